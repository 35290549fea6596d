"""Every metric of every service: names, labels and buckets, declared once. Knows no value.

Names are `radixmesh_<service>_<noun>_<unit>`. Label values come from our own
configuration and enums only, never from a request. Each service constructs its
class with a registry of its own, so tests see only what they did.
"""

from collections.abc import Sequence
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


class _Maker:
    """Declares the metrics of one service."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self._registry = registry
        self._prefix = f"radixmesh_{service}_"
        self.made: list[tuple[Counter | Gauge, tuple[str, ...]]] = []

    def counter(self, name: str, says: str, *labels: str) -> Counter:
        counter = Counter(self._prefix + name, says, labels, registry=self._registry)
        self.made.append((counter, labels))
        return counter

    def gauge(self, name: str, says: str, *labels: str) -> Gauge:
        gauge = Gauge(self._prefix + name, says, labels, registry=self._registry)
        self.made.append((gauge, labels))
        return gauge

    def histogram(self, name: str, says: str, *, buckets: Sequence[float]) -> Histogram:
        return Histogram(self._prefix + name, says, buckets=buckets, registry=self._registry)


class RouterMetrics:
    """What a router counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        make = _Maker(registry, "router")
        self.requests = make.counter(
            "requests_total",
            "Requests that ended, by edge (grpc, http) and outcome "
            "(finished, cancelled, an ErrorReason).",
            "edge",
            "outcome",
        )
        self.in_flight = make.gauge("requests_in_flight_count", "Requests admitted and not ended.")
        self._declare_admission(make)
        self.request_seconds = make.histogram(
            "request_seconds", "From arrival to end.", buckets=REQUEST_S
        )
        self.first_token_seconds = make.histogram(
            "first_token_seconds",
            "From arrival to the first token's delivery.",
            buckets=FIRST_TOKEN_S,
        )
        self.inter_token_seconds = make.histogram(
            "inter_token_seconds",
            "Between two deliveries of one output, divided by the tokens of the later one.",
            buckets=SHORT_S,
        )
        self._declare_tokens(make)
        self._declare_fleet(make)
        self._declare_links(make)

    def _declare_admission(self, make: _Maker) -> None:
        self.queued = make.gauge(
            "requests_queued_count",
            "Requests that wait for admission, by class: "
            "high (priority above 0), normal (0), low (below).",
            "priority",
        )
        self.queue_seconds = make.histogram(
            "queue_seconds", "Time that admitted requests waited for it.", buckets=SHORT_S
        )
        self.held_tokens = make.gauge(
            "tokens_in_use_count",
            "Tokens of admitted requests: prompts and the most they may generate.",
        )
        self.queued_tokens = make.gauge("tokens_queued_count", "Tokens that are waited for.")
        self.tenants = make.gauge("tenants_count", "Tenants whose use is remembered.")
        self.refusals = make.counter(
            "refusals_total",
            "Requests that admission refused, by ErrorReason and cause (requests, tokens or "
            "timeout of the queue; tenant_requests, tenant_tokens).",
            "reason",
            "cause",
        )

    def _declare_tokens(self, make: _Maker) -> None:
        self.prompt_tokens = make.counter("prompt_tokens_total", "Prompt ids of finished requests.")
        self.cached_tokens = make.counter(
            "cached_tokens_total", "Those of them whose KV was reused."
        )
        self.completion_tokens = make.counter("completion_tokens_total", "Output ids delivered.")
        self.prompt_size_tokens = make.histogram(
            "prompt_size_tokens", "Prompt ids per finished request.", buckets=TOKENS
        )
        self.predicted_tokens = make.counter(
            "predicted_tokens_total", "Those of them that the router expected to be reused."
        )
        self.possible_tokens = make.counter(
            "possible_tokens_total",
            "Those of them that the replica with the longest match would have reused.",
        )
        self.output_losses = make.counter(
            "output_losses_total",
            "Times that an output lost its replica or detokenizer, by service "
            "(worker, detokenizer) and ErrorReason, or ATTEMPT_TIMEOUT for one that was silent.",
            "service",
            "reason",
        )

    def _declare_fleet(self, make: _Maker) -> None:
        self.replicas = make.gauge(
            "replicas_count",
            "Replicas by phase (connecting, ready, draining, down) "
            "and view (exact, degraded, blind).",
            "phase",
            "view",
        )
        self.standings = make.gauge(
            "replicas_standing_count",
            "Replicas by what became of their requests: fit; open or half_open (they failed); "
            "ejected or retried (they answered late).",
            "standing",
        )
        self.turns = make.counter(
            "replica_turns_total", "Times that a replica came to stand so, by standing.", "standing"
        )
        self.choices = make.counter("choices_total", "Placements by policy.", "policy")
        self.choice_seconds = make.histogram(
            "choice_seconds",
            "Time to look up and price one request.",
            buckets=(0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005),
        )
        self.tree_blocks = make.gauge("tree_blocks_count", "Blocks in the meta-tree.")
        self.tree_evicted_blocks = make.counter(
            "tree_evicted_blocks_total", "Blocks that the tree's own budget dropped."
        )
        self.feed_events = make.counter(
            "feed_events_total", "Cache events applied, by kind (stored, removed, cleared).", "kind"
        )
        self.view_losses = make.counter(
            "view_losses_total",
            "Views that could not be trusted any more, by cause "
            "(gap, digest, contradiction, silence, mute).",
            "cause",
        )
        self.resyncs = make.counter("resyncs_total", "Snapshots asked for after a loss.")

    def _declare_links(self, make: _Maker) -> None:
        self.links_up = make.gauge(
            "links_up_count",
            "Links that are up, by service (worker, tokenizer, detokenizer).",
            "service",
        )
        self.links_lost = make.counter(
            "links_lost_total", "Links that were up and ended, by service.", "service"
        )
        self.link_entries = make.gauge(
            "link_entries_count", "Entries open on links, by service.", "service"
        )
        self.link_pending_bytes = make.gauge(
            "link_pending_bytes", "Unsent bytes of links, by service.", "service"
        )


class WorkerMetrics:
    """What the front of a worker group counts, once per replica whatever its ranks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        make = _Maker(registry, "worker")
        self.requests = make.counter(
            "requests_total",
            "Requests that ended, by replica and outcome (finished, cancelled, an ErrorReason).",
            "dp_rank",
            "outcome",
        )
        self.running = make.gauge("running_count", "Requests in the batch.", "dp_rank")
        self.waiting = make.gauge("waiting_count", "Requests queued.", "dp_rank")
        self.uncached_tokens = make.gauge(
            "uncached_tokens_count", "Prompt ids that are still to be computed.", "dp_rank"
        )
        self.prompt_tokens = make.counter(
            "prompt_tokens_total",
            "Prompt ids of started requests; of resumed ones also the output so far.",
            "dp_rank",
        )
        self.cached_tokens = make.counter(
            "cached_tokens_total", "Those of them whose KV was reused.", "dp_rank"
        )
        self.output_tokens = make.counter("output_tokens_total", "Ids generated.", "dp_rank")
        self.wait_seconds = make.histogram(
            "wait_seconds", "From acceptance to the start of the prefill.", buckets=FIRST_TOKEN_S
        )
        self._declare_replicas(make)
        self._declare_links(make)
        self._of_replica = [each for each in make.made if "dp_rank" in each[1]]

    def forget_replica(self, dp_rank: int) -> None:
        """Drop every series of a replica that is gone."""
        for metric, labels in self._of_replica:
            samples = [sample for family in metric.collect() for sample in family.samples]
            ours = {
                tuple(sample.labels[label] for label in labels)
                for sample in samples
                if sample.labels["dp_rank"] == str(dp_rank)
            }
            for values in ours:
                metric.remove(*values)

    def _declare_replicas(self, make: _Maker) -> None:
        self.kv_blocks = make.gauge("kv_blocks_count", "Blocks of the KV pool.", "dp_rank")
        self.kv_free_blocks = make.gauge(
            "kv_free_blocks_count", "Blocks that a new request could take.", "dp_rank"
        )
        self.cached_blocks = make.gauge(
            "cached_blocks_count", "Blocks in the prefix cache.", "dp_rank"
        )
        self.steps = make.counter("steps_total", "Steps that the replica reported.", "dp_rank")
        self.step_seconds = make.gauge(
            "decode_step_seconds", "Learned time of a decode step.", "dp_rank"
        )
        self.prefill_rate = make.gauge(
            "prefill_tokens_per_second", "Learned rate of prefill.", "dp_rank"
        )
        self.ready = make.gauge("ready_count", "1 while the replica takes work, else 0.", "dp_rank")
        self.restarts = make.counter(
            "restarts_total", "Restarts of the replica's ranks.", "dp_rank"
        )
        self.probe_seconds = make.histogram(
            "probe_seconds",
            "From a question to all ranks of a replica to their answer.",
            buckets=FIRST_TOKEN_S,
        )

    def _declare_links(self, make: _Maker) -> None:
        self.links = make.gauge("links_count", "Routers that are attached.")
        self.feed_events = make.counter(
            "feed_events_total", "Cache events of the replica.", "dp_rank"
        )
        self.feed_drops = make.counter(
            "feed_drops_total", "Feeds that were dropped for a slow router."
        )
        self.snapshots = make.counter("snapshots_total", "Snapshots sent.", "dp_rank")


class TextMetrics:
    """What a tokenizer or detokenizer counts. `service` is `tokenizer` or `detokenizer`."""

    def __init__(self, registry: CollectorRegistry, service: str) -> None:
        self.registry = registry
        make = _Maker(registry, service)
        self.entries = make.counter(
            "entries_total",
            "Entries that ended, by outcome (finished, cancelled, an ErrorReason).",
            "outcome",
        )
        self.in_flight = make.gauge("entries_in_flight_count", "Entries that are open.")
        self.tokens = make.counter("tokens_total", "Ids made or read.")
        self.bytes = make.counter("text_bytes_total", "Bytes of text read or made, as UTF-8.")
        self.seconds = make.histogram(
            "entry_seconds", "From an entry's arrival to its end.", buckets=SHORT_S
        )
        self.batch_entries = make.histogram(
            "batch_entries_count",
            "Entries handled together.",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
        )
        self.links = make.gauge("links_count", "Routers that are attached.")


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
