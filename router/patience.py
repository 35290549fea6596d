"""How long one output waits for a place. Knows time; not what is waited for."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class Patience:
    """Bounds waits since a place was lost, however many there are until it has another."""

    def __init__(self) -> None:
        # None while it has a place.
        self._until: float | None = None
        self._waiting: asyncio.Timeout | None = None

    @asynccontextmanager
    async def waiting(self, wait_s: float) -> AsyncGenerator[None]:
        """Bound a wait by `wait_s` since the first one after the last `renew`.

        Raises:
            TimeoutError: The time is over, or was cut short.
        """
        if self._until is None:
            self._until = asyncio.get_running_loop().time() + wait_s
        async with asyncio.timeout_at(self._until) as self._waiting:
            try:
                yield
            finally:
                self._waiting = None

    def renew(self) -> None:
        """It has a place: a later loss of it begins a new wait."""
        self._until = None

    def cut_short(self) -> None:
        """End a wait that is going on."""
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())
