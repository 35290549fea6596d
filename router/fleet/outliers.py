"""Which replicas answer far later than was predicted, while their siblings do not.

Knows predicted and actual seconds to the first id; no request, no replica, no clock
(instants come as `now`). A replica's own reports say how fast it is and how much waits
there, and the price counts on them: what is left over is a replica whose deeds are not
its words - a host that swaps, a throttled device, a lossy path. It is judged by the
logarithm of actual over predicted, by medians, against its siblings at the same time.
So a fleet that is slow altogether, or whose rates are guessed wrongly, ejects nobody.

The ratio does not correct the price: it holds one sort of request (first ids), carries
the waits of others, and would move all prices by its noise. Ejection is rare, bounded
in time and number, and ends by a probe.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from router.gates import Gate

# Makes a deviation of normal noise from a median of absolute deviations.
_NORMAL = 1.4826
LOOK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierLimits:
    """When a replica is an outlier, and how long it is left out.

    Attributes:
        window_s: Answers count for so long.
        samples: Answers that it takes to judge a replica, and to be compared with.
        siblings: Others with so many answers that it takes to compare with.
        ratio: It must be later than its siblings by this factor (0: nobody is ever left out) ...
        deviations: ... and by so many deviations among them.
        slack_s: Added to both times: less than this is no lateness.
        eject_s: How long it gets nothing for the first time; it doubles.
        most_eject_s: The longest time.
        share: Of the replicas, at most, that are left out at once; never the last.
    """

    window_s: float = 60.0
    samples: int = 8
    siblings: int = 2
    ratio: float = 3.0
    deviations: float = 5.0
    slack_s: float = 0.25
    eject_s: float = 30.0
    most_eject_s: float = 300.0
    share: float = 1 / 3


class Seat:
    """One replica, in one life, among those of its model."""

    def __init__(self, outliers: "Outliers") -> None:
        self.gate = Gate(outliers.limits.eject_s, outliers.limits.most_eject_s)
        self._outliers = outliers
        self._answers: deque[tuple[float, float]] = deque(maxlen=8 * outliers.limits.samples)
        self._median: float | None = None
        self._changed = False

    def __repr__(self) -> str:
        return f"<Seat {len(self._answers)} answers, {self.gate.trips} ejections>"

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.gate.allows(now)

    def reason(self, now: float) -> str:
        """Return why no request may be sent, for people; empty when one may."""
        if self.gate.allows(now):
            return ""
        left_s = self.gate.opens_in(now)
        if left_s:
            return f"it answers much later than its siblings; tried again in {left_s:.0f} s"
        return "it answered much later than its siblings; one request tries it"

    def on_sent(self, now: float) -> "Trial":
        """A request is sent, whatever `allows` says."""
        return Trial(self, probes=self.gate.take(now))

    def answered(self, predicted_s: float, actual_s: float, now: float, *, probes: bool) -> None:
        """The first ids of a request came."""
        limits = self._outliers.limits
        lateness = math.log((actual_s + limits.slack_s) / (predicted_s + limits.slack_s))
        if probes and not self.gate.closed:
            self._outliers.try_again(self, lateness, now)
        elif self.gate.closed:
            self._answers.append((now, lateness))
            self._changed = True
            self._outliers.judge(self, now)

    def lateness(self, now: float) -> float | None:
        """Return the median of its answers in the window; None when there are too few."""
        limits = self._outliers.limits
        while self._answers and now - self._answers[0][0] > limits.window_s:
            self._answers.popleft()
            self._changed = True
        if self._changed:
            self._changed = False
            few = len(self._answers) < limits.samples
            self._median = None if few else median(late for _, late in self._answers)
        return self._median

    def forget(self) -> None:
        """Start over with what comes from now on."""
        self._answers.clear()
        self._changed = True

    def leave(self) -> None:
        """Its life has ended."""
        self._outliers.leave(self)


class Trial:
    """One request's answer to its seat. An answer of before an ejection says nothing new."""

    __slots__ = ("_probes", "_seat", "_settled", "_trips")

    def __init__(self, seat: Seat, *, probes: bool) -> None:
        self._seat = seat
        self._probes = probes
        self._trips = seat.gate.trips
        self._settled = False

    def answered(self, predicted_s: float, actual_s: float, now: float) -> None:
        """Its first ids came."""
        if self._settle():
            self._seat.answered(predicted_s, actual_s, now, probes=self._probes)

    def failed(self, now: float) -> None:
        """It failed before, by the replica's fault."""
        if self._settle() and self._probes and not self._seat.gate.closed:
            self._seat.gate.trip(now)

    def free(self) -> None:
        """It ended without an answer that counts."""
        if self._settle() and self._probes and not self._seat.gate.closed:
            self._seat.gate.give_back()

    def _settle(self) -> bool:
        first, self._settled = not self._settled, True
        return first and self._trips == self._seat.gate.trips


class Outliers:
    """The replicas of one model."""

    def __init__(self, limits: OutlierLimits) -> None:
        self.limits = limits
        self._seats: set[Seat] = set()
        self._looked_at = float("-inf")
        self._middle = 0.0

    def __len__(self) -> int:
        return len(self._seats)

    def join(self) -> Seat:
        """Return the seat of a replica whose life begins."""
        seat = Seat(self)
        self._seats.add(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """A replica's life has ended. Idempotent."""
        self._seats.discard(seat)

    @property
    def ejected(self) -> int:
        """Replicas that are left out, those being tried included."""
        return sum(not seat.gate.closed for seat in self._seats)

    def judge(self, seat: Seat, now: float) -> None:
        """Eject a replica when it is an outlier and there is room for one more."""
        if not self.limits.ratio:
            return
        late = seat.lateness(now)
        if late is None or late - self._usual(now) <= math.log(self.limits.ratio):
            return
        room = self.ejected + 1 <= int(len(self._seats) * self.limits.share)
        if room and self._is_late(seat, late, now):
            seat.gate.trip(now)
            seat.forget()

    def try_again(self, seat: Seat, late: float, now: float) -> None:
        """The probe of an ejected replica was answered: take it back, or leave it out longer."""
        if self._is_late(seat, late, now):
            seat.gate.trip(now)
            return
        seat.gate.close()
        seat.forget()

    def _usual(self, now: float) -> float:
        """The median of all, looked at once a second: enough to see who needs a closer look."""
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            known = self._known(self._seats, now)
            self._middle = median(known) if known else 0.0
        return self._middle

    def _is_late(self, seat: Seat, late: float, now: float) -> bool:
        known = self._known(self._seats - {seat}, now)
        if len(known) < self.limits.siblings:
            return False
        excess = late - median(known)
        return excess > max(math.log(self.limits.ratio), self.limits.deviations * _spread(known))

    @staticmethod
    def _known(seats: Iterable[Seat], now: float) -> list[float]:
        found = [seat.lateness(now) for seat in seats]
        return [each for each in found if each is not None]


def _spread(known: list[float]) -> float:
    """How far values lie apart, robustly: what a few odd ones are does not matter."""
    middle = median(known)
    return _NORMAL * median(abs(value - middle) for value in known)
