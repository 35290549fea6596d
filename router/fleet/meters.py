"""What the fleet counts, in the terms of its own code. Knows metrics; decides nothing."""

import enum

from prometheus_client import CollectorRegistry

from radixmesh.telemetry.metrics import RouterMetrics
from router.fleet.changes import Change, Cleared, Removed, Stored
from router.fleet.fitness import Stance

_KINDS: dict[type[Change], str] = {Stored: "stored", Removed: "removed", Cleared: "cleared"}


class ViewLoss(enum.Enum):
    """Why a view can't be trusted any more."""

    GAP = enum.auto()  # a change is missing
    DIGEST = enum.auto()  # the replica's digest is another one
    CONTRADICTION = enum.auto()  # a change that can't follow from what was said before
    SILENCE = enum.auto()  # no snapshot, or no digest, in time
    MUTE = enum.auto()  # the replica reuses what its feed never told of


class Meters:
    """The fleet's side of `RouterMetrics`; without any, what it counts is seen by nobody."""

    def __init__(self, metrics: RouterMetrics | None = None) -> None:
        self._metrics = metrics or RouterMetrics(CollectorRegistry())
        events = self._metrics.feed_events
        self._events = {kind: events.labels(name) for kind, name in _KINDS.items()}
        losses = self._metrics.view_losses
        self._losses = {loss: losses.labels(loss.name.lower()) for loss in ViewLoss}

    def chosen(self, policy: str, seconds: float) -> None:
        """A policy placed a request; looking up and pricing took so long."""
        self._metrics.choices.labels(policy).inc()
        self._metrics.choice_seconds.observe(seconds)

    def turned(self, stance: Stance) -> None:
        """A replica stands otherwise by what became of its requests."""
        self._metrics.turns.labels(stance.value).inc()

    def applied(self, change: Change) -> None:
        """A replica's cache changed, and so did its view."""
        self._events[type(change)].inc()

    def view_lost(self, loss: ViewLoss) -> None:
        """A replica's view can't be trusted any more."""
        self._losses[loss].inc()

    def resync(self) -> None:
        """A new snapshot was asked for."""
        self._metrics.resyncs.inc()

    def link_lost(self) -> None:
        """The link of a group has ended."""
        self._metrics.links_lost.labels("worker").inc()
