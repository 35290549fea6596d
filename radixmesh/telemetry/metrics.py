"""Every metric of every service: names, labels and buckets, declared once. Knows no value.

Names are `radixmesh_<service>_<noun>_<unit>`. Label values come from our own
configuration and enums only, never from a request. Each service constructs its
class with a registry of its own, so tests see only what they did.
"""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

__all__ = [
    "MetricsServer",
    "RouterMetrics",
    "TextMetrics",
    "WorkerMetrics",
    "serve_metrics",
]

# Seconds from a request to its first token: cached prompts to long queues.
FIRST_TOKEN_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
# Seconds between tokens, queue waits, steps.
SHORT_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
REQUEST_S: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKENS: Final = (16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class RouterMetrics:
    """What a router counts. `outcome` is `finished`, `cancelled` or an ErrorReason name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "radixmesh_router_requests_total",
            "Requests that ended, by edge (grpc, http) and outcome.",
            ["edge", "outcome"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "radixmesh_router_requests_in_flight_count",
            "Requests admitted and not ended.",
            registry=registry,
        )
        self.queued = Gauge(
            "radixmesh_router_requests_queued_count",
            "Requests that wait for admission.",
            registry=registry,
        )
        self.request_seconds = Histogram(
            "radixmesh_router_request_seconds",
            "From arrival to end.",
            buckets=REQUEST_S,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "radixmesh_router_first_token_seconds",
            "From arrival to the first token's delivery.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self.inter_token_seconds = Histogram(
            "radixmesh_router_inter_token_seconds",
            "Between two deliveries of one output, divided by the tokens of the later one.",
            buckets=SHORT_S,
            registry=registry,
        )
        self.queue_seconds = Histogram(
            "radixmesh_router_queue_seconds",
            "From arrival to admission.",
            buckets=SHORT_S,
            registry=registry,
        )
        self._declare_tokens(registry)
        self._declare_fleet(registry)
        self._declare_links(registry)

    def _declare_tokens(self, registry: CollectorRegistry) -> None:
        self.prompt_tokens = Counter(
            "radixmesh_router_prompt_tokens_total",
            "Prompt ids of admitted requests.",
            registry=registry,
        )
        self.cached_tokens = Counter(
            "radixmesh_router_cached_tokens_total",
            "Prompt ids whose KV was reused.",
            registry=registry,
        )
        self.completion_tokens = Counter(
            "radixmesh_router_completion_tokens_total",
            "Output ids delivered.",
            registry=registry,
        )
        self.prompt_size_tokens = Histogram(
            "radixmesh_router_prompt_size_tokens",
            "Prompt ids per request.",
            buckets=TOKENS,
            registry=registry,
        )
        self.predicted_tokens = Counter(
            "radixmesh_router_predicted_tokens_total",
            "Prompt ids that the meta-tree expected to be reused.",
            registry=registry,
        )
        self.resumes = Counter(
            "radixmesh_router_resumes_total",
            "Outputs continued elsewhere, by the service that was lost (worker, detokenizer) "
            "and the reason.",
            ["service", "reason"],
            registry=registry,
        )

    def _declare_fleet(self, registry: CollectorRegistry) -> None:
        self.replicas = Gauge(
            "radixmesh_router_replicas_count",
            "Replicas by phase (starting, ready, draining, down) and view (synced, degraded, "
            "blind).",
            ["phase", "view"],
            registry=registry,
        )
        self.choices = Counter(
            "radixmesh_router_choices_total",
            "Placements by policy.",
            ["policy"],
            registry=registry,
        )
        self.choice_seconds = Histogram(
            "radixmesh_router_choice_seconds",
            "Time to look up and price one request.",
            buckets=(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005),
            registry=registry,
        )
        self.tree_blocks = Gauge(
            "radixmesh_router_tree_blocks_count",
            "Blocks in the meta-tree.",
            registry=registry,
        )
        self.tree_evicted_blocks = Counter(
            "radixmesh_router_tree_evicted_blocks_total",
            "Blocks that the tree's own budget dropped.",
            registry=registry,
        )
        self.feed_events = Counter(
            "radixmesh_router_feed_events_total",
            "Cache events applied, by kind (stored, removed, cleared).",
            ["kind"],
            registry=registry,
        )
        self.feed_gaps = Counter(
            "radixmesh_router_feed_gaps_total",
            "Gaps in the numbers of a replica's cache events.",
            registry=registry,
        )
        self.digest_mismatches = Counter(
            "radixmesh_router_digest_mismatches_total",
            "Digests that a replica's view did not match.",
            registry=registry,
        )
        self.resyncs = Counter(
            "radixmesh_router_resyncs_total",
            "Snapshots asked for, by cause (gap, digest, attach).",
            ["cause"],
            registry=registry,
        )

    def _declare_links(self, registry: CollectorRegistry) -> None:
        self.links_up = Gauge(
            "radixmesh_router_links_up_count",
            "Links that are up, by service (worker, tokenizer, detokenizer).",
            ["service"],
            registry=registry,
        )
        self.links_lost = Counter(
            "radixmesh_router_links_lost_total",
            "Links that were lost, by service.",
            ["service"],
            registry=registry,
        )
        self.link_entries = Gauge(
            "radixmesh_router_link_entries_count",
            "Entries open on links, by service.",
            ["service"],
            registry=registry,
        )
        self.link_pending_bytes = Gauge(
            "radixmesh_router_link_pending_bytes",
            "Unsent bytes of links, by service.",
            ["service"],
            registry=registry,
        )


class WorkerMetrics:
    """What the front of a worker group counts, once per replica whatever its ranks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "radixmesh_worker_requests_total",
            "Requests that ended, by replica and outcome (finished, cancelled, an ErrorReason).",
            ["dp_rank", "outcome"],
            registry=registry,
        )
        self.running = Gauge(
            "radixmesh_worker_running_count",
            "Requests in the batch.",
            ["dp_rank"],
            registry=registry,
        )
        self.waiting = Gauge(
            "radixmesh_worker_waiting_count",
            "Requests queued.",
            ["dp_rank"],
            registry=registry,
        )
        self.uncached_tokens = Gauge(
            "radixmesh_worker_uncached_tokens_count",
            "Prompt ids queued whose KV must be computed.",
            ["dp_rank"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "radixmesh_worker_prompt_tokens_total",
            "Prompt ids of started requests.",
            ["dp_rank"],
            registry=registry,
        )
        self.cached_tokens = Counter(
            "radixmesh_worker_cached_tokens_total",
            "Prompt ids whose KV was reused.",
            ["dp_rank"],
            registry=registry,
        )
        self.output_tokens = Counter(
            "radixmesh_worker_output_tokens_total",
            "Ids generated.",
            ["dp_rank"],
            registry=registry,
        )
        self.wait_seconds = Histogram(
            "radixmesh_worker_wait_seconds",
            "From acceptance to the start of the prefill.",
            buckets=FIRST_TOKEN_S,
            registry=registry,
        )
        self._declare_replicas(registry)
        self._declare_links(registry)

    def _declare_replicas(self, registry: CollectorRegistry) -> None:
        self.kv_blocks = Gauge(
            "radixmesh_worker_kv_blocks_count",
            "Blocks of the KV pool.",
            ["dp_rank"],
            registry=registry,
        )
        self.kv_free_blocks = Gauge(
            "radixmesh_worker_kv_free_blocks_count",
            "Blocks that a new request could take.",
            ["dp_rank"],
            registry=registry,
        )
        self.cached_blocks = Gauge(
            "radixmesh_worker_cached_blocks_count",
            "Blocks in the prefix cache.",
            ["dp_rank"],
            registry=registry,
        )
        self.steps = Counter(
            "radixmesh_worker_steps_total",
            "Steps that the replica reported.",
            ["dp_rank"],
            registry=registry,
        )
        self.step_seconds = Gauge(
            "radixmesh_worker_decode_step_seconds",
            "Learned time of a decode step.",
            ["dp_rank"],
            registry=registry,
        )
        self.prefill_rate = Gauge(
            "radixmesh_worker_prefill_tokens_per_second",
            "Learned rate of prefill.",
            ["dp_rank"],
            registry=registry,
        )
        self.ready = Gauge(
            "radixmesh_worker_ready_count",
            "1 while the replica takes work, else 0.",
            ["dp_rank"],
            registry=registry,
        )
        self.restarts = Counter(
            "radixmesh_worker_restarts_total",
            "Restarts of the replica's ranks.",
            ["dp_rank"],
            registry=registry,
        )

    def _declare_links(self, registry: CollectorRegistry) -> None:
        self.links = Gauge(
            "radixmesh_worker_links_count", "Routers that are attached.", registry=registry
        )
        self.feed_events = Counter(
            "radixmesh_worker_feed_events_total",
            "Cache events of the replica.",
            ["dp_rank"],
            registry=registry,
        )
        self.feed_drops = Counter(
            "radixmesh_worker_feed_drops_total",
            "Feeds that were dropped for a slow router.",
            registry=registry,
        )
        self.snapshots = Counter(
            "radixmesh_worker_snapshots_total",
            "Snapshots sent.",
            ["dp_rank"],
            registry=registry,
        )


class TextMetrics:
    """What a tokenizer or detokenizer counts. `service` is `tokenizer` or `detokenizer`."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self.registry = registry
        self.entries = Counter(
            f"radixmesh_{service}_entries_total",
            "Entries that ended, by outcome (finished, cancelled, an ErrorReason).",
            ["outcome"],
            registry=registry,
        )
        self.in_flight = Gauge(
            f"radixmesh_{service}_entries_in_flight_count",
            "Entries that are open.",
            registry=registry,
        )
        self.tokens = Counter(
            f"radixmesh_{service}_tokens_total", "Ids made or read.", registry=registry
        )
        self.bytes = Counter(
            f"radixmesh_{service}_text_bytes_total",
            "Bytes of text read or made, as UTF-8.",
            registry=registry,
        )
        self.seconds = Histogram(
            f"radixmesh_{service}_entry_seconds",
            "From an entry's arrival to its end.",
            buckets=SHORT_S,
            registry=registry,
        )
        self.batch_entries = Histogram(
            f"radixmesh_{service}_batch_entries_count",
            "Entries handled together.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=registry,
        )
        self.links = Gauge(
            f"radixmesh_{service}_links_count", "Routers that are attached.", registry=registry
        )


class MetricsServer:
    """A page for Prometheus on a thread of its own, so a busy loop still answers."""

    def __init__(self, port: int, registry: CollectorRegistry, *, host: str = "127.0.0.1") -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop listening and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(
    port: int | None, registry: CollectorRegistry, *, host: str = "127.0.0.1"
) -> MetricsServer | None:
    """Serve a registry at `http://host:port/metrics`; port 0 or None serves nothing.

    Raises:
        OSError: The port can't be had.
    """
    return MetricsServer(port, registry, host=host) if port else None
