"""Whether what became of a replica's requests speaks against sending it more.

One place for both judges, the breaker (it fails) and the outliers (it is late), and for
when it last showed that it works. Pure: instants come as `now`. A new life of a replica
is a new `Fitness`.
"""

import enum

from router.fleet.breaker import Breaker, BreakerLimits, Outcome, Permit
from router.fleet.outliers import Outliers, Seat, Trial


class Stance(enum.Enum):
    """How a replica stands, for metrics."""

    FIT = "fit"
    OPEN = "open"
    HALF_OPEN = "half_open"
    EJECTED = "ejected"
    RETRIED = "retried"


class Stay:
    """One request at a replica: tell it what became of it. What follows its end is ignored.

    Args:
        predicted_s: Until its first ids.
        began_at: When it was sent.
    """

    __slots__ = ("_began_at", "_permit", "_trial", "predicted_s")

    def __init__(
        self, permit: Permit, trial: Trial, *, predicted_s: float, began_at: float
    ) -> None:
        self.predicted_s = predicted_s
        self._permit = permit
        self._trial = trial
        self._began_at = began_at

    def note(self, outcome: Outcome, now: float) -> None:
        """Something became of it."""
        self._permit.note(outcome, now)
        if outcome is Outcome.BEGAN:
            self._trial.answered(self.predicted_s, now - self._began_at, now)
        elif outcome is Outcome.FAILED:
            self._trial.failed(now)
        else:
            self._trial.free()


class Fitness:
    """Of one replica in one life."""

    def __init__(self, limits: BreakerLimits, outliers: Outliers) -> None:
        self.breaker = Breaker(limits)
        self.seat: Seat = outliers.join()

    def __repr__(self) -> str:
        return f"<Fitness {self.breaker!r} {self.seat!r}>"

    @property
    def clear(self) -> bool:
        """Whether nothing speaks against it, now or later, until something is noted."""
        return self.breaker.gate.closed and self.seat.gate.closed

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.breaker.allows(now) and self.seat.allows(now)

    def reason(self, now: float) -> str:
        """Return why no request may be sent, for people; empty when one may."""
        if self.clear:
            return ""
        return self.breaker.reason(now) or self.seat.reason(now)

    def stance(self, now: float) -> Stance:
        """Return how it stands."""
        if not self.breaker.gate.closed:
            return Stance.HALF_OPEN if not self.breaker.gate.opens_in(now) else Stance.OPEN
        if not self.seat.gate.closed:
            return Stance.RETRIED if not self.seat.gate.opens_in(now) else Stance.EJECTED
        return Stance.FIT

    def suffered_at(self) -> float:
        """When it last failed; who never did comes first when none is fit."""
        failed_at = self.breaker.failed_at
        return float("-inf") if failed_at is None else failed_at

    def on_sent(self, *, predicted_s: float, now: float) -> Stay:
        """A request is sent, whatever `allows` says."""
        permit, trial = self.breaker.on_sent(now), self.seat.on_sent(now)
        return Stay(permit, trial, predicted_s=predicted_s, began_at=now)

    def leave(self) -> None:
        """The life has ended."""
        self.seat.leave()
