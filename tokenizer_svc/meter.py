"""Entries, counted the same way in both services: each begins once and ends once."""

import time
from dataclasses import dataclass, field

from radixmesh.errors import MeshError
from radixmesh.telemetry.metrics import TextMetrics

FINISHED = "finished"


@dataclass(slots=True)
class Entry:
    """One open entry of a link or one plain call; begins when it is made."""

    metrics: TextMetrics
    began_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.metrics.in_flight.inc()

    def end(self, error: MeshError | None = None) -> None:
        """Count the end. To be called exactly once."""
        self.metrics.in_flight.dec()
        self.metrics.seconds.observe(time.monotonic() - self.began_s)
        self.metrics.entries.labels(_outcome(error)).inc()


def _outcome(error: MeshError | None) -> str:
    if error is None:
        return FINISHED
    return "cancelled" if error.reason == "CANCELLED" else error.reason
