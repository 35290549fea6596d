"""Whether what became of a replica's requests speaks against sending it more.

One place for both judges, the breaker (it fails) and the outliers (it is late), and for
when it last showed that it works. Pure: instants come as `now`. A new life of a replica
is a new `Fitness`.
"""

import enum
from collections.abc import Callable
from weakref import WeakValueDictionary

from router.fleet.breaker import Breaker, BreakerLimits, Outcome
from router.fleet.outliers import OutlierLimits, Outliers, Seat


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
        fitness: Of the replica, in the life that the request was sent to.
        predicted_s: Until its first ids.
        now: When it was sent.
    """

    __slots__ = ("_began_at", "_fitness", "_permit", "_trial", "predicted_s")

    def __init__(self, fitness: "Fitness", *, predicted_s: float, now: float) -> None:
        self.predicted_s = predicted_s
        self._fitness = fitness
        self._permit = fitness.breaker.on_sent(now)
        self._trial = fitness.seat.on_sent(now)
        self._began_at = now

    def note(self, outcome: Outcome, now: float) -> bool:
        """Something became of it; return whether the replica stands otherwise than before."""
        before = self._fitness.stance(now)
        self._permit.note(outcome, now)
        if outcome is Outcome.BEGAN:
            self._trial.answered(max(0.0, self.predicted_s), now - self._began_at, now)
        elif outcome is Outcome.FAILED:
            self._trial.failed(now)
        else:
            self._trial.free()
        return self._fitness.turned(before, now)


class Fitness:
    """Of one replica in one life.

    Args:
        limits: Of its breaker.
        outliers: Of its model; they live as long as one of the replicas does.
        on_turn: Told how it stands after each change of that.
    """

    def __init__(
        self,
        limits: BreakerLimits,
        outliers: Outliers,
        on_turn: Callable[[Stance], None] = lambda _: None,
    ) -> None:
        self.breaker = Breaker(limits)
        self.seat: Seat = outliers.join()
        self._outliers = outliers
        self._on_turn = on_turn

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

    def turned(self, before: Stance, now: float) -> bool:
        """Tell how it stands if that has changed; return whether it has."""
        after = self.stance(now)
        if after is not before:
            self._on_turn(after)
        return after is not before

    def suffered_at(self) -> float:
        """When it last failed; who never did comes first when none is fit."""
        failed_at = self.breaker.failed_at
        return float("-inf") if failed_at is None else failed_at

    def on_sent(self, *, predicted_s: float, now: float) -> Stay:
        """A request is sent, whatever `allows` says."""
        return Stay(self, predicted_s=predicted_s, now=now)

    def leave(self) -> None:
        """The life has ended."""
        self.seat.leave()


class Judges:
    """Makes the fitness of replicas, and keeps apart those of different models.

    Args:
        breaker: When a replica fails too often.
        outliers: When one is too late; a ratio of 0 means never.
        on_turn: Told how a replica stands after each change of that.
    """

    def __init__(
        self,
        breaker: BreakerLimits | None = None,
        outliers: OutlierLimits | None = None,
        *,
        on_turn: Callable[[Stance], None] = lambda _: None,
    ) -> None:
        self._on_turn = on_turn
        self._breaker = breaker or BreakerLimits()
        self._limits = outliers or OutlierLimits()
        self._models: WeakValueDictionary[str, Outliers] = WeakValueDictionary()

    def fitness(self, model: str) -> Fitness:
        """Return that of a replica whose life begins."""
        outliers = self._models.get(model)
        if outliers is None:
            outliers = self._models[model] = Outliers(self._limits)
        return Fitness(self._breaker, outliers, self._on_turn)
