"""The common pace of all streams: those with text that waits are woken together.

One timer for everybody, and one turn of the event loop in which they all write. Knows
instants and who waits; nothing of what is delivered.
"""

import asyncio


class Beat:
    """Strikes at whole multiples of an interval on the loop's clock, when somebody waits.

    Args:
        interval_s: Seconds between two strikes.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._waiting: dict[asyncio.Event, None] = {}  # a set that keeps the order
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Beat {self.interval_s:g} s, {len(self._waiting)} waiting>"

    def __len__(self) -> int:
        return len(self._waiting)

    def join(self, wake: asyncio.Event) -> None:
        """Have an event set at the next strike. Idempotent."""
        self._waiting[wake] = None
        if self._timer is None:
            loop = asyncio.get_running_loop()
            passed = loop.time() // self.interval_s
            self._timer = loop.call_at((passed + 1) * self.interval_s, self._strike)

    def leave(self, wake: asyncio.Event) -> None:
        """Don't wait any more. Idempotent."""
        self._waiting.pop(wake, None)
        if self._timer is not None and not self._waiting:
            self._timer.cancel()
            self._timer = None

    def _strike(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        for wake in waiting:
            wake.set()
