"""Who may come in and how long: the API key, how many requests run and wait at once.

Knows counts and keys; nothing of what a request asks for. One event loop.
"""

import asyncio
import hmac
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Final

from radixmesh.errors import BadApiKey, DeadlineExceeded, QueueFull

# A client that reads nothing is let go so long after its request's deadline.
LINGER_S: Final = 5.0


class ApiKey:
    """Compares what callers bring with the configured key, in constant time.

    Args:
        key: The key; empty lets everybody in.
    """

    def __init__(self, key: str) -> None:
        self._expected = f"Bearer {key}".encode() if key else b""

    def check(self, authorization: str | None) -> None:
        """Check the value of an `authorization` header or metadata entry.

        Raises:
            BadApiKey: It is missing or is not `Bearer <key>`.
        """
        given = (authorization or "").encode(errors="replace")
        if self._expected and not hmac.compare_digest(given, self._expected):
            raise BadApiKey("the API key is missing or wrong")


class Admission:
    """Permits for requests, and a bounded queue, first in first out, for those who wait.

    A permit is held until its request's stream has ended in any way.

    Args:
        max_concurrent: Permits; 0 means no limit.
        max_queued: Requests that may wait for a permit.
        queue_timeout_s: Seconds that a request may wait.
        on_admitted: Told how many seconds each admitted request waited.
    """

    def __init__(
        self,
        *,
        max_concurrent: int,
        max_queued: int,
        queue_timeout_s: float,
        on_admitted: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._max_queued = max_queued
        self._queue_timeout_s = queue_timeout_s
        self._on_admitted = on_admitted
        self._running = 0
        self._queued = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def __repr__(self) -> str:
        return f"<Admission {self._running}/{self._max_concurrent} running, {self.queued} queued>"

    @property
    def running(self) -> int:
        """Permits that are held."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait for a permit."""
        return self._queued

    @asynccontextmanager
    async def admit(self, timeout_s: float) -> AsyncGenerator[None]:
        """Hold a permit for the time of the context.

        Args:
            timeout_s: Seconds until the request's deadline.

        Raises:
            QueueFull: The queue is full, or the wait in it was too long.
            DeadlineExceeded: The deadline came first.
        """
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        await self._enter(timeout_s)
        try:
            self._on_admitted(loop.time() - arrived)
            yield
        finally:
            self._leave()

    async def _enter(self, timeout_s: float) -> None:
        if self._max_concurrent <= 0 or (self._running < self._max_concurrent and not self.queued):
            self._running += 1
            return
        if self.queued >= self._max_queued:
            raise QueueFull(
                "too many requests run and wait",
                limit=self._max_concurrent,
                queued=self.queued,
            )
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._queued += 1
        try:
            async with asyncio.timeout(min(timeout_s, self._queue_timeout_s)):
                await waiter
        except BaseException as error:
            self._give_up(waiter)
            if not isinstance(error, TimeoutError):
                raise
            if timeout_s < self._queue_timeout_s:
                raise DeadlineExceeded("the deadline passed in the queue") from None
            raise QueueFull(
                "the wait for a free place was too long", limit=self._max_concurrent
            ) from None

    def _give_up(self, waiter: asyncio.Future[None]) -> None:
        granted = waiter.done() and not waiter.cancelled()
        if granted:
            # The permit came in the same moment as the cancel or time-out: hand it on.
            self._leave()
        elif waiter in self._waiting:
            self._waiting.remove(waiter)
            self._queued -= 1

    def _leave(self) -> None:
        # A permit that goes to a waiter stays counted as running.
        while self._waiting:
            waiter = self._waiting.popleft()
            self._queued -= 1
            if not waiter.done():
                waiter.set_result(None)
                return
        self._running -= 1
