"""Something that is done at once, but never more often than every so many seconds."""

import asyncio
from collections.abc import Callable


class Throttle:
    """Does it when it is called; calls that come too soon are one call later.

    Args:
        pause_s: The least time between two.
        act: What is done.
    """

    def __init__(self, pause_s: float, act: Callable[[], None]) -> None:
        self._pause_s = pause_s
        self._act = act
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        """Do it, now or as soon as it may be."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            return
        if loop.time() >= self._next_at:
            self._do()
        else:
            self._timer = loop.call_at(self._next_at, self._do)

    def cancel(self) -> None:
        """Don't do what is still to be done."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _do(self) -> None:
        self._timer = None
        self._act()
        self._next_at = asyncio.get_running_loop().time() + self._pause_s
