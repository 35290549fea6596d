"""One replica: whether it gets requests, what it holds, how loaded it is.

Knows its own state only: no other replica, no link, no clock of its own (instants
come as `now`). Work on it ends with its incarnation.
"""

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.fleet.booking import Booking
from router.fleet.breaker import Outcome
from router.fleet.feed import Feed, Index
from router.fleet.fitness import Fitness, Stance, Stay
from router.fleet.pulse import Pulse
from router.fleet.views import Phase
from router.fleet.workload import Report, Workload
from router.policy.choice import View
from router.tree.predicted import Predicted

SNAPSHOT_GRACE_S = 10.0  # a replica that sends no snapshot gets requests after so long
RESUMES_UNSTARTED_LIMIT = 8
LEASE_S = 10.0  # a booking that is never sent is given up
_PAST_LIMIT = 16


class Reported(enum.IntEnum):
    """What the group says of a replica; values of worker.v1.ReplicaState."""

    UP = 1
    DRAINING = 2
    DOWN = 3


@dataclass(slots=True)
class Counters:
    """Sums since the router started."""

    routed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Replica:
    """One data-parallel copy of a group's model.

    Args:
        group_id, dp_rank: Its name.
        index: The tree and the marks.
        ask: Asks it for a new snapshot.
        touch: Told after a change of what a choice looks at.
        judge: Makes what says, for one life, whether what became of requests speaks against it.
    """

    def __init__(
        self,
        group_id: str,
        dp_rank: int,
        *,
        index: Index,
        ask: Callable[[], None],
        touch: Callable[["Replica"], None] = lambda _: None,
        judge: Callable[[], Fitness],
    ) -> None:
        self.group_id = group_id
        self.dp_rank = dp_rank
        self.feed = Feed(index, ask=ask, on_lost=self._remember, name=f"{group_id}/{dp_rank}")
        self.pulse = Pulse()
        self._judge = judge
        self._fitness: Fitness | None = None  # of its present life, when there is one
        self._touch = touch
        self._stood: tuple[str, bool, View] | None = None
        self.workload = Workload()
        self.counters = Counters()
        self.incarnation = 0
        self.withheld = ""  # why its group gets nothing new
        self._predicted = Predicted()
        self._bookings: dict[Booking, Sequence[int]] = {}
        self._reported = Reported.DOWN
        self._connected = False
        self._admitted = False
        self._up_at = 0.0
        self._past: deque[int] = deque(maxlen=_PAST_LIMIT)

    def __repr__(self) -> str:
        return f"<Replica {self.group_id}/{self.dp_rank}#{self.incarnation:x} {self.feed!r}>"

    @property
    def in_flight(self) -> int:
        """Requests of this router there."""
        return self.workload.entries

    def announced(self, incarnation: int) -> bool:
        """Whether this link has said of it that it has this incarnation, or had it."""
        return incarnation in self._past or (self._connected and incarnation == self.incarnation)

    def phase(self, now: float) -> Phase:
        """Return whether it gets requests now."""
        if not self._connected:
            return Phase.CONNECTING
        if self._reported is Reported.DOWN:
            return Phase.DOWN
        if self._reported is Reported.DRAINING or self.withheld:
            return Phase.DRAINING
        return Phase.READY if self.admitted(now) else Phase.CONNECTING

    def unfit(self, now: float) -> str:
        """Return why it can't be chosen now, for people; empty when it can."""
        phase = self.phase(now)
        if phase is Phase.READY:
            return self._fitness.reason(now) if self._fitness else ""
        return self.withheld if phase is Phase.DRAINING and self.withheld else phase.name.lower()

    def stance(self, now: float) -> Stance:
        """Return how it stands by what became of its requests."""
        return self._fitness.stance(now) if self._fitness else Stance.FIT

    def suffered_at(self, now: float) -> float | None:
        """Return when it last failed, if only its past speaks against it; None if it can't work."""
        ready = self.phase(now) is Phase.READY
        return self._fitness.suffered_at() if ready and self._fitness else None

    def stand(self, now: float) -> str:
        """Return why it can't be chosen now, as it is put on a board."""
        self._stood = self._posture(now)
        return self._stood[0]

    def _posture(self, now: float) -> tuple[str, bool, View]:
        """What changes with time alone."""
        return self.unfit(now), self.workload.is_fresh(now), self.feed.view

    def refuses_resume(self) -> str:
        """Return why it takes no interrupted stream though it takes work; empty when it does."""
        return (
            "" if self.resume_room else f"{RESUMES_UNSTARTED_LIMIT} interrupted streams wait there"
        )

    @property
    def resume_room(self) -> int:
        """How many more interrupted streams may wait there for their prefill."""
        return max(0, RESUMES_UNSTARTED_LIMIT - self.workload.unstarted_resumes)

    def admitted(self, now: float) -> bool:
        """Whether its first snapshot is complete, or had its time."""
        if not self._admitted and self._connected:
            self._admitted = self.feed.has_snapshot or now - self._up_at >= SNAPSHOT_GRACE_S
        return self._admitted

    def on_status(self, incarnation: int, reported: Reported, now: float) -> bool:
        """The group announced it; return whether what it had is gone."""
        lost = incarnation != self.incarnation or reported is Reported.DOWN
        began = not self._connected or lost or self._reported is Reported.DOWN
        self._connected = True
        self._reported = reported
        if lost:
            self._lose(now)
        if reported is Reported.DOWN:
            self._end_fitness()
        if incarnation != self.incarnation:
            self._past.append(self.incarnation)
            self.incarnation = incarnation
            self._end_fitness()
            self._fitness = self._judge()
            self.pulse.begin(now)
        self.pulse.excuse(reported is Reported.DRAINING, now)
        if began and reported is not Reported.DOWN:
            self._up_at = now
            self._admitted = False
            self.feed.begin(now)
        self._touch(self)
        return lost

    def on_feed(self) -> None:
        """Its feed said something."""
        self._touch(self)

    def on_reused(self, keys: Sequence[int]) -> None:
        """It said that it found these leading blocks of a prompt in its cache."""
        was = self.feed.view
        self.feed.on_reused(keys)
        if self.feed.view is not was:
            self._touch(self)

    def on_link_down(self, now: float) -> None:
        """Nothing is known of it until the link is back."""
        self._connected = False
        self._lose(now)
        self._touch(self)

    def on_report(self, report: Report, now: float) -> None:
        """It said how loaded it is."""
        self.workload.report(report, now)
        self.pulse.hear(report, now)
        self._touch(self)

    def on_step(self, now: float) -> None:
        """It has made a step."""
        self.pulse.beat(now)

    def sent(self, predicted_s: float, now: float) -> Stay:
        """A request goes there; its first ids are expected after so long."""
        self._fitness = self._fitness or self._judge()
        return self._fitness.on_sent(predicted_s=predicted_s, now=now)

    def on_outcome(self, stay: Stay, outcome: Outcome, now: float) -> None:
        """Something became of a request there."""
        if stay.note(outcome, now):
            self._touch(self)

    def _end_fitness(self) -> None:
        if self._fitness is not None:
            self._fitness.leave()

    def withhold(self, why: str) -> None:
        """Nothing new is to be sent there; an empty reason takes that back."""
        self.withheld = why
        self._touch(self)

    def _lose(self, now: float) -> None:
        for booking in list(self._bookings):
            booking.release()
        self.workload.forget()
        self._predicted.clear()
        self._admitted = False
        self.feed.stop(now)

    @property
    def guessed(self) -> bool:
        """Whether what it holds is guessed from what was sent there."""
        return self.feed.view is View.DEGRADED

    def guess(self, keys: Sequence[int], now: float) -> int:
        """Return how many leading keys it holds by what was sent there."""
        return self._predicted.depth(keys, now)

    def book(self, booking: Booking, keys: Sequence[int], now: float) -> None:
        """Count a booking, from this moment on."""
        self.workload.book(booking.charge)
        self._bookings[booking] = keys
        if self.feed.view is View.DEGRADED:
            self._predicted.learn(keys, now)
        self._touch(self)

    def unbook(self, booking: Booking) -> None:
        """Count it no more."""
        self.workload.release(booking.charge)
        self._bookings.pop(booking, None)
        self._touch(self)

    def tick(self, now: float) -> None:
        """Notice what did not come."""
        self.feed.tick(now)
        if self._posture(now) != self._stood:
            self._touch(self)
        for booking in list(self._bookings):
            if not booking.charge.entry_ids and now - booking.booked_at > LEASE_S:
                booking.release()

    def _remember(self, now: float) -> None:
        """The view was lost: what this router has there now is the first guess."""
        for keys in self._bookings.values():
            self._predicted.learn(keys, now)

    def close(self) -> None:
        """It has left the fleet."""
        for booking in list(self._bookings):
            booking.release()
        self._end_fitness()
        self.feed.close()
