"""How fast places become free while others wait for them. Pure: instants come as `now`."""

from collections import deque
from typing import Final

# Departures that are looked at.
SAMPLES: Final = 64
# Seconds that are named while nothing is known.
UNKNOWN_S: Final = 1.0


class Outflow:
    """The rate of what leaves, since a line formed or over the last departures."""

    def __init__(self) -> None:
        self._since = 0.0
        self._left: deque[tuple[float, int]] = deque()
        self._sum = 0

    def begin(self, now: float) -> None:
        """A line formed: what left before, when nobody waited, says nothing."""
        self._since = now
        self._left.clear()
        self._sum = 0

    def note(self, units: int, now: float) -> None:
        """So much has left."""
        self._left.append((now, units))
        self._sum += units
        if len(self._left) > SAMPLES:
            self._since, gone = self._left.popleft()
            self._sum -= gone

    def seconds_for(self, units: int, now: float) -> float:
        """Return how long it takes until so much more has left, as things went so far."""
        passed = now - self._since
        if not self._sum:
            return max(UNKNOWN_S, passed)
        return units * passed / self._sum
