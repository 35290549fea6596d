"""A circuit breaker: a replica that fails again and again gets no new work for a while.

Knows what became of the requests that were sent there; no request, no replica, no
clock (instants come as `now`). Only what speaks of the replica counts: not what was
wrong with a request, not that the replica has enough to do, not that somebody left.

A `Gate` is the door of it, and of whatever else keeps work away: closed, it lets all
through; open, nobody, for a time that grows; after that one request, as a probe, and
what becomes of that decides.
"""

import enum
from dataclasses import dataclass

from router.waits import Growing

# What a replica says or does when something is wrong with it. Errors of a request, of a link,
# back-pressure (QUEUE_FULL, LINK_OVERLOADED, DRAINING), cancels and deadlines are not among them.
FAULTS = frozenset({"GROUP_LOST", "RANK_DESYNC", "INTERNAL"})


class State(enum.IntEnum):
    """Whether work may pass."""

    CLOSED = 1
    OPEN = 2
    HALF_OPEN = 3


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


class Gate:
    """Lets all through, or none, or one.

    Args:
        open_s: How long it is open for the first time.
        most_open_s: For the longest time.
    """

    def __init__(self, open_s: float, most_open_s: float) -> None:
        self.trips = 0  # ever: whoever was sent before the last one says nothing new
        self._in_a_row = 0
        self._waits = Growing(open_s, most_open_s)
        self._shut_until: float | None = None
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether all may pass."""
        return self._shut_until is None

    def state(self, now: float) -> State:
        """Return whether work may pass."""
        if self._shut_until is None:
            return State.CLOSED
        return State.OPEN if now < self._shut_until else State.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether one more request may pass."""
        if self._shut_until is None:
            return True
        return now >= self._shut_until and not self._probing

    def opens_in(self, now: float) -> float:
        """Seconds until a probe may pass; 0 when one may, or all may."""
        return max(0.0, (self._shut_until or 0.0) - now)

    def trip(self, now: float) -> None:
        """Let nobody pass; each time for longer, until `reset`."""
        self.trips += 1
        self._in_a_row += 1
        self._shut_until = now + self._waits.seconds(self._in_a_row)
        self._probing = False

    def take(self, now: float) -> bool:
        """A request is sent, whatever `allows` says; return whether it is the probe."""
        probes = self._shut_until is not None and self.allows(now)
        self._probing = self._probing or probes
        return probes

    def give_back(self) -> None:
        """The probe told nothing: another may be sent."""
        self._probing = False

    def close(self) -> None:
        """Let all pass."""
        self._shut_until = None
        self._probing = False

    def reset(self) -> None:
        """All is well: the next time that it opens is a short one again."""
        self._in_a_row = 0


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
        if self.gate.allows(now):
            return ""
        left_s = self.gate.opens_in(now)
        if left_s:
            return f"it failed {self._failures} times in a row; tried again in {left_s:.0f} s"
        return "it failed; one request tries it"

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
