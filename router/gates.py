"""Keeps work away from somebody for a while. Pure: instants come as `now`.

The words are those of circuit breakers: closed, all pass; open, nobody does, for a time that
grows; half open, one request does, as a probe, and what becomes of it decides. Whoever owns the
gate judges.
"""

import enum

from radixmesh.waits import Growing


class State(enum.IntEnum):
    """Whether work may pass."""

    CLOSED = 1
    OPEN = 2
    HALF_OPEN = 3


class Gate:
    """Lets all through, or none, or one.

    Args:
        open_s: How long it is open the first time.
        most_open_s: The longest that it is open.
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

    def reason(self, now: float, *, shut: str, trying: str) -> str:
        """Return why nothing may pass, for people; empty when one may.

        Args:
            now: The instant.
            shut: Why it is open; when it will be tried again is added.
            trying: What to say while a probe is under way.
        """
        if self.allows(now):
            return ""
        left_s = self.opens_in(now)
        return f"{shut}; tried again in {left_s:.0f} s" if left_s else trying

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
