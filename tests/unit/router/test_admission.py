"""Permits, the queue for them, and the API key."""

import asyncio
import random

import pytest

from radixmesh.errors import BadApiKey, DeadlineExceeded, Draining, QueueFull
from router.edge.admission import Admission, ApiKey
from router.edge.permit import Told


def admission(permits: int = 1, queued: int = 8, wait_s: float = 5.0) -> Admission:
    return Admission(max_concurrent=permits, max_queued=queued, queue_timeout_s=wait_s)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Stream:
    """A request that holds its permit until it is let go."""

    def __init__(self, where: Admission, timeout_s: float = 60.0) -> None:
        self.entered = False
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._run(where, timeout_s))

    async def _run(self, where: Admission, timeout_s: float) -> None:
        async with where.admit(timeout_s):
            self.entered = True
            await self.end.wait()


async def test_no_more_run_than_there_are_permits_and_those_who_wait_go_in_order() -> None:
    where = admission(permits=2)
    streams = [Stream(where) for _ in range(5)]
    await settle()
    assert [stream.entered for stream in streams] == [True, True, False, False, False]
    assert (where.running, where.queued) == (2, 3)
    streams[1].end.set()
    await settle()
    assert [stream.entered for stream in streams] == [True, True, True, False, False]
    for stream in streams:
        stream.end.set()
    await asyncio.gather(*(stream.task for stream in streams))
    assert (where.running, where.queued) == (0, 0)


async def test_a_full_queue_is_refused_with_a_retry_hint() -> None:
    where = admission(queued=1)
    streams = [Stream(where) for _ in range(3)]
    await settle()
    with pytest.raises(QueueFull) as refusal:
        await streams[2].task
    assert refusal.value.retry_after_s
    assert refusal.value.metadata["cause"] == "requests"
    for stream in streams[:2]:
        stream.end.set()
        await stream.task


async def test_a_wait_in_the_queue_is_bounded() -> None:
    where = admission(wait_s=0.02)
    holder, waiter = Stream(where), Stream(where)
    with pytest.raises(QueueFull):
        await waiter.task
    assert (where.running, where.queued) == (1, 0)
    holder.end.set()
    await holder.task


async def test_a_deadline_before_the_end_of_the_wait_is_a_deadline() -> None:
    where = admission()
    holder, waiter = Stream(where), Stream(where, timeout_s=0.02)
    with pytest.raises(DeadlineExceeded):
        await waiter.task
    holder.end.set()
    await holder.task


async def test_no_limit_means_no_limit() -> None:
    where = admission(permits=0)
    streams = [Stream(where) for _ in range(100)]
    await settle()
    assert where.running == 100
    for stream in streams:
        stream.end.set()
        await stream.task
    assert where.running == 0


async def test_a_newcomer_does_not_overtake_the_queue() -> None:
    where = admission()
    holder, waiter = Stream(where), Stream(where)
    await settle()
    holder.end.set()
    newcomer = Stream(where)
    await settle()
    assert waiter.entered
    assert not newcomer.entered
    waiter.end.set()
    newcomer.end.set()
    await asyncio.gather(holder.task, waiter.task, newcomer.task)


async def test_a_permit_that_comes_with_the_cancel_goes_to_the_next() -> None:
    where = admission()
    holder, doomed, heir = Stream(where), Stream(where), Stream(where)
    await settle()
    holder.end.set()
    await holder.task
    # The permit is on its way to `doomed`, who has not run since.
    doomed.task.cancel()
    await settle()
    assert heir.entered
    heir.end.set()
    await heir.task
    assert (where.running, where.queued) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
async def test_a_storm_of_ends_errors_and_cancels_returns_every_permit_once(seed: int) -> None:
    chance = random.Random(seed)
    where = admission(permits=4, queued=1000)
    streams = [Stream(where) for _ in range(60)]
    for _ in range(300):
        stream = chance.choice(streams)
        if chance.random() < 0.4:
            stream.task.cancel()
        else:
            stream.end.set()
        if chance.random() < 0.5:
            await asyncio.sleep(0)
        assert where.running <= 4
    for stream in streams:
        stream.end.set()
    await asyncio.gather(*(stream.task for stream in streams), return_exceptions=True)
    assert (where.running, where.queued) == (0, 0)


async def test_an_end_sends_all_away_who_wait_and_nobody_else() -> None:
    where = admission()
    holder, first, second, doomed = (Stream(where) for _ in range(4))
    await settle()
    where.end(Draining("the router stops"))
    # Between the word and their turn one leaves by itself, and the place becomes free.
    doomed.task.cancel()
    holder.end.set()
    ends = await asyncio.gather(first.task, second.task, doomed.task, return_exceptions=True)
    assert [type(end) for end in ends] == [Draining, Draining, asyncio.CancelledError]
    await holder.task
    assert (where.running, where.queued) == (0, 0)
    async with where.admit(1.0):
        assert where.running == 1


async def test_waiting_times_are_told() -> None:
    waits: list[float] = []
    where = Admission(
        max_concurrent=1, max_queued=1, queue_timeout_s=1, told=Told(admitted=waits.append)
    )
    async with where.admit(1.0):
        pass
    assert len(waits) == 1
    assert 0 <= waits[0] < 1


@pytest.mark.parametrize(
    "given", [None, "", "secret", "Bearer", "Bearer wrong", "bearer secret", "Bearer secret ", "é"]
)
def test_anything_but_the_key_is_refused(given: str | None) -> None:
    with pytest.raises(BadApiKey):
        ApiKey("secret").check(given)


def test_the_key_opens_and_no_key_lets_everybody_in() -> None:
    ApiKey("secret").check("Bearer secret")
    ApiKey("").check(None)
    ApiKey("").check("Bearer whatever")
