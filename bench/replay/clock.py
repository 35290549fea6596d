"""Virtual time: what is to happen, in order. Nothing sleeps."""

import heapq
from collections.abc import Callable


class Clock:
    """Runs actions at their instants; those of one instant in the order of their arrival."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def at(self, instant: float, action: Callable[[], None]) -> None:
        """Run an action then; an instant that has passed is now."""
        self._serial += 1
        heapq.heappush(self._queue, (max(instant, self.now), self._serial, action))

    def run(self) -> None:
        """Go on until nothing is left."""
        while self._queue:
            self.now, _, action = heapq.heappop(self._queue)
            action()
