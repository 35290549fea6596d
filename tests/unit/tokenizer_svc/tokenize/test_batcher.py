"""The batcher: bounded, batched, off the loop; a cancelled item costs nothing."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from radixmesh.errors import Draining, InternalError, InvalidRequest, MeshError, QueueFull
from tokenizer_svc.tokenize.batcher import Batcher, BatchLimits, Job

Result = str | MeshError


class Workshop:
    """Work that waits in its thread until it is let go, unless all of it is quick."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()
        self.quick: set[str] = set()

    def work(self, items: Sequence[str]) -> list[Result]:
        self.batches.append(list(items))
        if not self.quick.issuperset(items):
            self.gate.wait(10)
        if "explode" in items:
            raise ValueError("inside")
        return [InvalidRequest("bad") if item == "bad" else item.upper() for item in items]


class Bench:
    """A batcher over a workshop, and what it answered."""

    def __init__(self, limits: BatchLimits) -> None:
        self.shop = Workshop()
        self.batcher: Batcher[str, str] = Batcher(self.shop.work, limits)
        self.answers: dict[str, Result] = {}
        self._answered = asyncio.Event()

    def submit(self, item: str, size: int = 1) -> Job[str, str]:
        def on_done(result: Result) -> None:
            self.answers[item] = result
            self._answered.set()

        return self.batcher.submit(item, size, on_done)

    async def answered(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.answers) < count:
                self._answered.clear()
                await self._answered.wait()


@asynccontextmanager
async def bench(
    threads: int = 1,
    waiting: int = 10,
    waiting_bytes: int = 1000,
    batch: int = 4,
    batch_bytes: int = 100,
) -> AsyncGenerator[Bench]:
    limits = BatchLimits(
        threads=threads,
        waiting=waiting,
        waiting_bytes=waiting_bytes,
        batch=batch,
        batch_bytes=batch_bytes,
    )
    made = Bench(limits)
    try:
        yield made
    finally:
        made.shop.gate.set()
        await made.batcher.close(10)


async def test_what_waits_while_the_thread_is_busy_goes_in_one_batch() -> None:
    async with bench() as made:
        for item in "abcdef":
            made.submit(item)
        made.shop.gate.set()
        await made.answered(6)
        assert made.shop.batches == [["a"], ["b", "c", "d", "e"], ["f"]]
        assert made.answers == {item: item.upper() for item in "abcdef"}


async def test_a_batch_is_bounded_in_bytes_but_takes_at_least_one_item() -> None:
    async with bench(batch_bytes=100) as made:
        made.submit("a")
        for item in "bcd":
            made.submit(item, 60)
        made.submit("huge", 500)
        made.shop.gate.set()
        await made.answered(5)
        assert made.shop.batches == [["a"], ["b"], ["c"], ["d"], ["huge"]]


async def test_short_items_do_not_wait_for_many_long_ones() -> None:
    async with bench(threads=2, batch_bytes=100) as made:
        made.shop.quick = {"short", "small"}
        for item in ("long", "longer"):
            made.submit(item, 200)
        for item in ("short", "small"):
            made.submit(item)
        await made.answered(2)
        assert made.answers.keys() == {"short", "small"}
        made.shop.gate.set()
        await made.answered(4)


async def test_a_long_item_that_came_first_is_not_passed_for_ever() -> None:
    async with bench(batch_bytes=100) as made:
        made.submit("a")
        for item, size in (("b", 1), ("long", 200), ("c", 1), ("d", 100)):
            made.submit(item, size)
        made.shop.gate.set()
        await made.answered(5)
        assert made.shop.batches == [["a"], ["b", "c"], ["long"], ["d"]]


async def test_the_loop_is_free_while_a_thread_works() -> None:
    async with bench() as made:
        made.submit("a")
        for _ in range(10):
            await asyncio.sleep(0)
        assert made.answers == {}
        made.shop.gate.set()
        await made.answered(1)


async def test_too_many_items_or_bytes_are_refused_with_a_hint() -> None:
    async with bench(waiting=2, waiting_bytes=50) as made:
        made.submit("running")
        made.submit("a", 40)
        with pytest.raises(QueueFull) as caught:
            made.submit("b", 11)
        assert caught.value.retry_after_s
        made.submit("b", 10)
        with pytest.raises(QueueFull):
            made.submit("c", 0)


async def test_a_cancelled_item_is_never_worked_on_and_frees_its_place() -> None:
    async with bench(waiting=1) as made:
        made.submit("running")
        waiting = made.submit("a")
        waiting.cancel()
        waiting.cancel()
        assert made.batcher.waiting == 0
        made.submit("b")
        made.shop.gate.set()
        await made.answered(2)
        assert made.shop.batches == [["running"], ["b"]]
        assert set(made.answers) == {"running", "b"}


async def test_an_item_cancelled_in_its_thread_gets_no_answer() -> None:
    async with bench() as made:
        running = made.submit("a")
        made.submit("b")
        running.cancel()
        made.shop.gate.set()
        await made.answered(1)
        assert made.answers == {"b": "B"}


async def test_a_bad_item_fails_alone() -> None:
    async with bench() as made:
        for item in ("running", "bad", "good"):
            made.submit(item)
        made.shop.gate.set()
        await made.answered(3)
        assert isinstance(made.answers["bad"], InvalidRequest)
        assert made.answers["good"] == "GOOD"


async def test_a_bug_in_the_work_fails_its_batch_and_nothing_else() -> None:
    """B57."""
    async with bench() as made:
        made.submit("explode")
        made.submit("next")
        made.shop.gate.set()
        await made.answered(2)
        assert isinstance(made.answers["explode"], InternalError)
        assert "inside" not in made.answers["explode"].message
        assert made.answers["next"] == "NEXT"


async def test_closing_finishes_what_waits_within_the_grace() -> None:
    async with bench() as made:
        made.submit("a")
        made.submit("b")
        made.shop.gate.set()
        await made.batcher.close(10)
        assert made.answers == {"a": "A", "b": "B"}
        with pytest.raises(Draining):
            made.submit("c")


async def test_closing_without_grace_fails_what_waits() -> None:
    async with bench() as made:
        made.submit("running")
        made.submit("a")
        await made.batcher.close(0)
        assert isinstance(made.answers["a"], Draining)
        made.shop.gate.set()
        await made.answered(2)
        assert made.answers["running"] == "RUNNING"
