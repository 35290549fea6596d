"""What waits for the client of one request: text merges until the client takes it.

Knows pace and bounds of delivery; nothing of where text comes from. One consumer.
"""

import asyncio
from dataclasses import dataclass, field

from radixmesh.errors import MeshError, SlowConsumer
from router.beat import Beat
from router.journal import Fresh
from router.request import Delta, Event, Finish, TokenLogprob

# What one log probability weighs: the id, its bytes, the number.
LOGPROB_BYTES = 64


@dataclass(slots=True)
class _Pending:
    """New text of one output since the client last took it."""

    texts: list[str] = field(default_factory=list)
    ids: bytearray = field(default_factory=bytearray)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    size: int = 0


class Stream:
    """Events of one request, taken in batches.

    The first text of each output is handed over at once, and so is text that comes a
    whole interval after the last batch; other text waits for the beat, at most an
    interval. An end or an error never waits.

    Args:
        beat: The pace of all streams; with an interval of 0 nothing waits.
        max_pending_bytes: Bound of what one output may have waiting.
    """

    def __init__(self, *, beat: Beat, max_pending_bytes: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._beat = beat
        self._max_pending_bytes = max_pending_bytes
        self._pending: dict[int, _Pending] = {}
        self._begun: set[int] = set()
        self._finishes: list[Finish] = []
        self._error: MeshError | None = None
        self._ended = False
        self._due = asyncio.Event()
        self._due_at = 0.0

    def add(self, choice: int, fresh: Fresh) -> None:
        """Append new text of one output.

        Raises:
            SlowConsumer: The client reads too slowly; what it has not taken is dropped.
        """
        pending = self._pending.setdefault(choice, _Pending())
        pending.texts.append(fresh.text)
        pending.ids += fresh.ids
        pending.logprobs.extend(fresh.logprobs)
        pending.size += 4 * len(fresh.text) + len(fresh.ids) + LOGPROB_BYTES * len(fresh.logprobs)
        if pending.size > self._max_pending_bytes:
            self._pending.clear()
            raise SlowConsumer("the client reads too slowly", limit_bytes=self._max_pending_bytes)
        self._schedule(first=choice not in self._begun)

    def _schedule(self, *, first: bool) -> None:
        if first or self._loop.time() >= self._due_at:
            self._due.set()
        else:
            self._beat.join(self._due)

    def finish(self, event: Finish) -> None:
        """End one output."""
        self._finishes.append(event)
        self._due.set()

    def fail(self, error: MeshError) -> None:
        """End the stream by an error; what waits is handed over first."""
        if not self._ended:
            self._error = error
            self.end()

    def end(self) -> None:
        """End the stream; idempotent."""
        self._ended = True
        self._due.set()

    def close(self) -> None:
        """The client is gone: wait for nothing."""
        self._beat.leave(self._due)

    async def take(self) -> list[Event]:
        """Return the next events; none when the stream has ended.

        Raises:
            MeshError: The stream ended by it.
        """
        while True:
            await self._due.wait()
            events = self._drain()
            if events:
                return events
            if self._error is not None:
                raise self._error
            if self._ended:
                return []

    def _drain(self) -> list[Event]:
        self._beat.leave(self._due)
        if not self._ended:
            self._due.clear()
        events: list[Event] = [
            Delta(choice, "".join(one.texts), bytes(one.ids), tuple(one.logprobs))
            for choice, one in self._pending.items()
        ]
        events.extend(self._finishes)
        self._begun.update(self._pending)
        self._pending.clear()
        self._finishes.clear()
        self._due_at = self._loop.time() + self._beat.interval_s
        return events
