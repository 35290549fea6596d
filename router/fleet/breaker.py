"""A circuit breaker: a replica that fails again and again gets no new work for a while.

Knows what became of the requests that were sent there; no request, no replica, no
clock (instants come as `now`). Only what speaks of the replica counts: not what was
wrong with a request, not that the replica has enough to do, not that somebody left.
"""

import enum
from dataclasses import dataclass

from router.gates import Gate

# What a replica says or does when something is wrong with it. Errors of a request, of a link,
# back-pressure (QUEUE_FULL, LINK_OVERLOADED, DRAINING), cancels and deadlines are not among them.
FAULTS = frozenset({"GROUP_LOST", "RANK_DESYNC", "INTERNAL"})


class Outcome(enum.Enum):
    """What became of a request at a replica."""

    BEGAN = enum.auto()  # it has brought ids; more may come
    FINISHED = enum.auto()
    FAILED = enum.auto()  # and it speaks against the replica
    NOTHING = enum.auto()  # it left, or failed for another reason


def outcome_of(reason: str) -> Outcome:
    """Return what an error, known by its reason, says of the replica that it came from."""
    return Outcome.FAILED if reason in FAULTS else Outcome.NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerLimits:
    """When to open, and how long.

    Attributes:
        failures: In a row, until it opens; 0: never.
        open_s: The first time; it doubles whenever a probe fails.
        most_open_s: The longest time.
    """

    failures: int = 5
    open_s: float = 10.0
    most_open_s: float = 300.0


class Permit:
    """One request's way through a breaker: tell it what became of the request."""

    __slots__ = ("_breaker", "_probes", "_settled", "_trips")

    def __init__(self, breaker: "Breaker", *, probes: bool) -> None:
        self._breaker = breaker
        self._probes = probes
        self._trips = breaker.gate.trips
        self._settled = False

    def note(self, outcome: Outcome, now: float) -> None:
        """Something became of the request; what comes after its end is ignored."""
        if self._settled:
            return
        self._settled = outcome is not Outcome.BEGAN
        if self._trips != self._breaker.gate.trips:
            return
        if self._probes:
            self._breaker.gate.give_back()
        self._breaker.note(outcome, now, probes=self._probes)


class Breaker:
    """Of one replica in one life."""

    def __init__(self, limits: BreakerLimits) -> None:
        self.gate = Gate(limits.open_s, limits.most_open_s)
        self.failed_at: float | None = None
        self._limits = limits
        self._failures = 0

    def __repr__(self) -> str:
        return f"<Breaker {self._failures} failures, {self.gate.trips} trips>"

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.gate.allows(now)

    def reason(self, now: float) -> str:
        """Return why no request may be sent, for people; empty when one may."""
        shut = f"it failed {self._failures} times in a row"
        return self.gate.reason(now, shut=shut, trying="it failed; one request tries it")

    def on_sent(self, now: float) -> Permit:
        """A request is sent, whatever `allows` says.

        One that is sent for want of another place, while it is open, may close it and
        does not keep it open for longer.
        """
        return Permit(self, probes=self.gate.take(now))

    def note(self, outcome: Outcome, now: float, *, probes: bool) -> None:
        """A permit of the present time tells what became of its request."""
        if outcome is Outcome.BEGAN:
            self._on_sign()
        elif outcome is Outcome.FINISHED:
            self._on_sign()
            self._failures = 0
            self.gate.reset()
        elif outcome is Outcome.FAILED:
            self._on_failure(now, probes=probes)

    def _on_sign(self) -> None:
        if not self.gate.closed:
            # On trial: until an output has ended well, the next failure opens it again.
            self._failures = max(0, self._limits.failures - 1)
            self.gate.close()

    def _on_failure(self, now: float, *, probes: bool) -> None:
        self.failed_at = now
        self._failures += 1
        full = self._limits.failures and self._failures >= self._limits.failures
        if probes or (self.gate.closed and full):
            self.gate.trip(now)
