"""Waiting until something holds, looked at whenever it may have changed. Knows no more."""

import asyncio
from collections.abc import Callable


class News:
    """Tells everybody who waits to look again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def tell(self) -> None:
        """Something may have changed."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Return once it holds; at once when it does already."""
        while not holds():
            await self._next.wait()
