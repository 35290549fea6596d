"""What the front counts, in the terms of its own code. Knows metrics; decides nothing.

Gauges are read from the replicas when they are scraped, so they are never stale.
"""

from collections.abc import Callable

from prometheus_client import Gauge

from radixmesh.telemetry.metrics import WorkerMetrics
from worker.front.replica import Replica, ReplicaState
from worker.request import StepOutput


class Meters:
    """The front's side of `WorkerMetrics`."""

    def __init__(self, metrics: WorkerMetrics) -> None:
        self._metrics = metrics

    def watch_links(self, count: Callable[[], int]) -> None:
        """Read the number of attached routers from this whenever it is scraped."""
        self._metrics.links.set_function(count)

    def watch(self, replica: Replica, *, kv_blocks: Callable[[], int]) -> None:
        """Read a replica's gauges whenever they are scraped."""
        metrics = self._metrics
        readers: list[tuple[Gauge, Callable[[], float]]] = [
            (metrics.running, lambda: replica.load.running),
            (metrics.waiting, lambda: replica.load.waiting),
            (metrics.uncached_tokens, lambda: replica.load.uncached_tokens),
            (metrics.kv_free_blocks, lambda: replica.load.free_blocks),
            (metrics.prefill_rate, lambda: replica.load.prefill_rate),
            (metrics.step_seconds, lambda: replica.load.decode_step_s),
            (metrics.cached_blocks, lambda: len(replica.mirror)),
            (metrics.ready, lambda: replica.state is ReplicaState.UP),
            (metrics.kv_blocks, kv_blocks),
        ]
        for gauge, read in readers:
            gauge.labels(dp_rank=replica.dp_rank).set_function(read)
        # So that a rate has a beginning.
        metrics.restarts.labels(dp_rank=replica.dp_rank)

    def forget(self, dp_rank: int) -> None:
        """Show nothing more of a replica that is gone."""
        self._metrics.forget_replica(dp_rank)

    def started(
        self, dp_rank: int, *, prompt_tokens: int, cached_tokens: int, waited_s: float
    ) -> None:
        """Count a prefill that began."""
        self._metrics.prompt_tokens.labels(dp_rank=dp_rank).inc(prompt_tokens)
        self._metrics.cached_tokens.labels(dp_rank=dp_rank).inc(cached_tokens)
        self._metrics.wait_seconds.observe(waited_s)

    def step(self, dp_rank: int, output: StepOutput) -> None:
        """Count a step."""
        self._metrics.steps.labels(dp_rank=dp_rank).inc()
        if output.counts:
            self._metrics.output_tokens.labels(dp_rank=dp_rank).inc(sum(output.counts))
        if output.changes:
            self._metrics.feed_events.labels(dp_rank=dp_rank).inc(len(output.changes))

    def ended(self, dp_rank: int, outcome: str) -> None:
        """Count a request that ended: `finished`, `cancelled` or the reason of its failure."""
        self._metrics.requests.labels(dp_rank=dp_rank, outcome=outcome).inc()

    def lost(self, dp_rank: int) -> None:
        """Count a replica whose ranks are started anew."""
        self._metrics.restarts.labels(dp_rank=dp_rank).inc()

    def answered(self, seconds: float) -> None:
        """Count a probe that all ranks of a replica have answered."""
        self._metrics.probe_seconds.observe(seconds)

    def feed_dropped(self) -> None:
        """Count a feed that a router was too slow for."""
        self._metrics.feed_drops.inc()

    def snapshot(self, dp_rank: int) -> None:
        """Count a snapshot that was begun."""
        self._metrics.snapshots.labels(dp_rank=dp_rank).inc()
