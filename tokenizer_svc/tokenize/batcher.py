"""Work off the event loop, batched with whatever waits. Knows sizes and bounds; no tokenizer.

The library's batch call releases the GIL, so a few threads keep the loop free;
what arrives while they are busy goes together in the next batch. An item larger
than a batch is long: it goes alone, and never are all threads busy with long ones,
so that short ones do not wait for them. All methods are called on the loop.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from radixmesh.errors import Draining, MeshError, QueueFull
from radixmesh.rpc.status import conceal

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Bounds of a batcher. A batch always takes at least one item, however large."""

    threads: int = 2
    waiting: int = 4096
    waiting_bytes: int = 64 * 1024 * 1024
    batch: int = 64
    batch_bytes: int = 256 * 1024


class Job(Generic[Item, Result]):
    """One submitted item."""

    def __init__(
        self,
        batcher: "Batcher[Item, Result]",
        item: Item,
        size: int,
        on_done: Callable[[Result | MeshError], None],
    ) -> None:
        self._batcher = batcher
        self.item = item
        self.size = size
        self._on_done: Callable[[Result | MeshError], None] | None = on_done

    def cancel(self) -> None:
        """Nobody wants the result any more; idempotent. A waiting item is never worked on."""
        self._on_done = None
        self._batcher.forget(self)

    def settle(self, result: Result | MeshError) -> None:
        """Hand over the result, unless cancelled."""
        on_done, self._on_done = self._on_done, None
        if on_done:
            on_done(result)


class Batcher(Generic[Item, Result]):
    """A bounded queue in front of a few threads.

    Args:
        work: Called in a thread with a batch; returns one result or error per item.
        limits: Bounds.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Item]], Sequence[Result | MeshError]],
        limits: BatchLimits,
    ) -> None:
        self._work = work
        self._limits = limits
        self._threads = ThreadPoolExecutor(limits.threads, thread_name_prefix="batch")
        self._waiting: dict[Job[Item, Result], None] = {}  # in order of arrival
        self._waiting_bytes = 0
        self._running: set[asyncio.Future[Sequence[Result | MeshError]]] = set()
        self._long_running = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"Batcher(waiting={self.waiting}, running={len(self._running)})"

    @property
    def waiting(self) -> int:
        """Items that no thread has taken yet."""
        return len(self._waiting)

    def submit(
        self, item: Item, size: int, on_done: Callable[[Result | MeshError], None]
    ) -> Job[Item, Result]:
        """Queue an item.

        Args:
            item: What to work on.
            size: Its bytes.
            on_done: Called once on the loop with the result, unless the job is cancelled.

        Raises:
            QueueFull: Too many items or bytes wait.
            Draining: The batcher is closed.
        """
        if self._closed:
            raise Draining("no new work is taken")
        limits = self._limits
        over_bytes = self._waiting and self._waiting_bytes + size > limits.waiting_bytes
        if len(self._waiting) >= limits.waiting or over_bytes:
            raise QueueFull("too many prompts wait to be encoded", limit=limits.waiting)
        job = Job(self, item, size, on_done)
        self._waiting[job] = None
        self._waiting_bytes += size
        self._start_batches()
        return job

    def forget(self, job: Job[Item, Result]) -> None:
        """Take a job out of the queue, if it still waits; called by the job."""
        if job in self._waiting:
            del self._waiting[job]
            self._waiting_bytes -= job.size

    async def close(self, grace_s: float = 0.0) -> None:
        """Take no new work, finish what waits within `grace_s`, fail the rest as Draining."""
        self._closed = True
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        while self._running and loop.time() < end:
            await asyncio.wait(self._running, timeout=end - loop.time())
        for job in list(self._waiting):
            self.forget(job)
            job.settle(Draining("the service stops"))
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start_batches(self) -> None:
        while len(self._running) < self._limits.threads and (batch := self._next_batch()):
            self._long_running += self._is_long(batch[0])
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._threads, self._work, [job.item for job in batch])
            self._running.add(future)
            future.add_done_callback(partial(self._finish, batch))

    def _next_batch(self) -> list[Job[Item, Result]]:
        """Take the first that may run now, and short ones behind it if it is short."""
        room_for_long = self._long_running < max(1, self._limits.threads - 1)
        batch: list[Job[Item, Result]] = []
        size = 0
        for job in self._waiting:
            long = self._is_long(job)
            if long and (batch or not room_for_long):
                continue
            if batch and size + job.size > self._limits.batch_bytes:
                break
            batch.append(job)
            size += job.size
            if long or len(batch) == self._limits.batch:
                break
        for job in batch:
            self.forget(job)
        return batch

    def _is_long(self, job: Job[Item, Result]) -> bool:
        return job.size > self._limits.batch_bytes

    def _finish(
        self,
        batch: list[Job[Item, Result]],
        future: "asyncio.Future[Sequence[Result | MeshError]]",
    ) -> None:
        self._running.discard(future)
        self._long_running -= self._is_long(batch[0])
        for job, result in zip(batch, self._results(batch, future), strict=True):
            job.settle(result)
        self._start_batches()

    def _results(
        self,
        batch: list[Job[Item, Result]],
        future: "asyncio.Future[Sequence[Result | MeshError]]",
    ) -> Sequence[Result | MeshError]:
        if future.cancelled():
            return [Draining("the service stops")] * len(batch)
        fault = future.exception()
        if fault is not None:
            return [conceal(fault, "a batch")] * len(batch)
        return future.result()
