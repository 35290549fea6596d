"""Permits in tokens, classes and tenants' rates, as requests on the event loop meet them."""

import asyncio
import random
from typing import Any

import pytest

from radixmesh.errors import MeshError, QueueFull, RateLimited
from router.edge.admission import Admission, TokenLimits
from router.edge.permit import Told
from router.edge.tenants import Rate, Tenants


def admission(
    *,
    permits: int = 0,
    queued: int = 1000,
    tokens: int = 0,
    queued_tokens: int = 0,
    wait_s: float = 60.0,
    **fields: Any,
) -> Admission:
    return Admission(
        max_concurrent=permits,
        max_queued=queued,
        queue_timeout_s=wait_s,
        tokens=TokenLimits(max_concurrent=tokens, max_queued=queued_tokens),
        **fields,
    )


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


class Stream:
    """A request of `most` tokens that runs until it is let go."""

    def __init__(
        self, where: Admission, most: int, *, priority: int = 0, tenant: str = "", used: int = 0
    ) -> None:
        self.most = most
        self.used = used
        self.entered = False
        self.running = False
        self.end = asyncio.Event()
        self.tokenized = asyncio.Event()
        self.tokenized.set()
        self.task = asyncio.create_task(self._run(where, priority, tenant))

    async def _run(self, where: Admission, priority: int, tenant: str) -> None:
        async with where.admit(60.0, priority=priority, tenant=tenant) as permit:
            self.entered = True
            await self.tokenized.wait()
            await permit.take_tokens(self.most, lambda: self.used)
            self.running = True
            try:
                await self.end.wait()
            finally:
                self.running = False

    async def finish(self) -> None:
        self.end.set()
        await self.task


async def finish(*streams: Stream) -> None:
    for stream in streams:
        stream.end.set()
    await asyncio.gather(*(stream.task for stream in streams))


def assert_empty(where: Admission) -> None:
    assert (where.running, where.queued, where.tokens, where.queued_tokens) == (0, 0, 0, 0)
    assert set(where.queued_by_band.values()) == {0}


async def test_no_more_tokens_run_than_there_are() -> None:
    where = admission(tokens=100)
    streams = [Stream(where, 40) for _ in range(4)]
    await settle()
    assert [stream.running for stream in streams] == [True, True, False, False]
    assert (where.running, where.queued) == (2, 2)
    assert (where.tokens, where.queued_tokens) == (80, 80)
    await streams[0].finish()
    await settle()
    assert [stream.running for stream in streams] == [False, True, True, False]
    await finish(*streams[1:])
    assert_empty(where)


async def test_a_large_request_is_not_overtaken_by_small_ones_of_its_class() -> None:
    where = admission(tokens=100)
    holder, large = Stream(where, 60), Stream(where, 80)
    await settle()
    small = [Stream(where, 1) for _ in range(50)]
    await settle()
    assert not large.running
    assert not any(stream.running for stream in small)
    await holder.finish()
    await settle()
    assert large.running
    assert sum(stream.running for stream in small) == 20
    await finish(large, *small)
    assert_empty(where)


async def test_a_request_larger_than_the_limit_runs_alone() -> None:
    where = admission(tokens=100)
    holder, giant, small = Stream(where, 10), Stream(where, 500), Stream(where, 10)
    await settle()
    assert not giant.running
    await holder.finish()
    await settle()
    assert giant.running
    assert not small.running
    assert where.tokens == 500
    await giant.finish()
    await settle()
    assert small.running
    await small.finish()
    assert_empty(where)


async def test_when_the_one_that_did_not_fit_gives_up_the_next_goes() -> None:
    where = admission(tokens=100)
    holder, large, small = Stream(where, 60), Stream(where, 80), Stream(where, 30)
    await settle()
    assert not small.running
    large.task.cancel()
    await settle()
    assert small.running
    await finish(holder, small)
    assert_empty(where)


async def test_higher_classes_go_first_in_both_lines() -> None:
    for where in (admission(permits=1), admission(tokens=10)):
        holder = Stream(where, 10)
        await settle()
        low, high, higher = (Stream(where, 10, priority=each) for each in (-1, 3, 50))
        await settle()
        assert where.queued_by_band == {"high": 2, "normal": 0, "low": 1}
        order = []
        for _ in range(4):
            await holder.finish()
            await settle()
            running = [one for one in (low, high, higher) if one.running]
            assert len(running) <= 1
            if running:
                holder = running[0]
                order.append(holder)
        assert order == [higher, high, low]
        assert_empty(where)


@pytest.mark.parametrize("limits", [{"permits": 1}, {"tokens": 10}])
async def test_a_low_class_is_served_under_a_never_ending_flood_of_a_higher_one(
    limits: dict[str, int],
) -> None:
    where = admission(**limits)
    running = Stream(where, 10, priority=9)
    await settle()
    low = Stream(where, 10, priority=-9)
    flood = [Stream(where, 10, priority=9) for _ in range(3)]
    await settle()
    turns = 0
    while not low.running:
        turns += 1
        await running.finish()
        flood.append(Stream(where, 10, priority=9))
        await settle()
        running = next((stream for stream in flood if stream.running), running)
    # Seven of the flood passed it, then it was its turn.
    assert turns == 8
    await finish(low, *flood)
    assert_empty(where)


async def test_lines_are_bounded_in_requests_and_in_tokens() -> None:
    causes: list[tuple[str, str]] = []
    told = Told(refused=lambda *refusal: causes.append(refusal))
    where = admission(tokens=10, queued=2, told=told)
    streams = [Stream(where, 10) for _ in range(4)]
    await settle()
    with pytest.raises(QueueFull, match="too many"):
        await streams[3].task
    await finish(*streams[:3])

    where = admission(tokens=10, queued_tokens=25, told=told)
    streams = [Stream(where, most) for most in (10, 10, 20, 15)]
    await settle()
    assert where.queued_tokens == 25
    with pytest.raises(QueueFull, match="too many"):
        await streams[2].task
    await finish(streams[0], streams[1], streams[3])
    assert causes == [("QUEUE_FULL", "requests"), ("QUEUE_FULL", "tokens")]
    assert_empty(where)


async def test_who_holds_a_place_may_wait_for_tokens_though_the_line_is_full() -> None:
    where = admission(permits=2, queued=1, tokens=10)
    streams = [Stream(where, 10) for _ in range(3)]
    await settle()
    assert [stream.entered for stream in streams] == [True, True, False]
    assert (where.running, where.queued) == (1, 2)
    await finish(*streams)
    assert_empty(where)


async def test_the_wait_for_tokens_is_bounded_by_what_is_left_of_the_patience() -> None:
    where = admission(permits=1, tokens=10, wait_s=0.2)
    async with where.admit(60) as first:
        waiting = asyncio.create_task(_enter_and_take(where))
        await first.take_tokens(10, lambda: 0)
        with pytest.raises(QueueFull, match="too long"):
            await waiting
    assert_empty(where)

    where = admission(tokens=10, wait_s=0.05)
    holder, late = Stream(where, 10), Stream(where, 10)
    with pytest.raises(QueueFull) as refusal:
        await late.task
    assert refusal.value.metadata["cause"] == "timeout"
    await holder.finish()
    assert_empty(where)


async def _enter_and_take(where: Admission) -> None:
    async with where.admit(60) as permit:
        await permit.take_tokens(10, lambda: 0)


async def test_the_hint_says_when_the_line_will_have_been_served() -> None:
    clock = asyncio.get_running_loop()
    where = admission(permits=1, queued=3)
    began = clock.time()
    running = Stream(where, 1)
    await settle()
    waiting = [Stream(where, 1) for _ in range(3)]
    await settle()
    for _ in range(2):
        await asyncio.sleep(0.1)
        await running.finish()
        await settle()
        running = next(stream for stream in waiting if stream.running)
        waiting.append(Stream(where, 1))
        await settle()
    late = Stream(where, 1)
    with pytest.raises(QueueFull) as refusal:
        await late.task
    # Two left since the line formed; three wait, and the one who asks.
    passed = clock.time() - began
    assert refusal.value.retry_after_s == pytest.approx(4 * passed / 2, rel=0.2)
    await finish(*waiting)
    assert_empty(where)


def limited(**rate: int) -> Admission:
    return admission(tenants=Tenants(default=Rate(**rate)))


async def test_a_tenant_over_its_requests_is_refused_and_others_are_not() -> None:
    where = limited(requests=2)
    for _ in range(2):
        await _one(where, "a")
    with pytest.raises(RateLimited) as refusal:
        await _one(where, "a")
    # Two a minute: one every half minute.
    assert refusal.value.retry_after_s == pytest.approx(30, abs=1)
    assert refusal.value.code == "RESOURCE_EXHAUSTED"
    await _one(where, "b")
    assert_empty(where)


async def _one(where: Admission, tenant: str, most: int = 1, used: int = 1) -> None:
    async with where.admit(60, tenant=tenant) as permit:
        await permit.take_tokens(most, lambda: used)


async def test_tokens_are_reserved_at_once_and_settled_at_the_end() -> None:
    where = limited(tokens=6000)
    stream = Stream(where, 5000, tenant="a", used=100)
    await settle()
    with pytest.raises(RateLimited) as refusal:
        await _one(where, "a", most=2000)
    # A thousand are missing, and a hundred come each second.
    assert refusal.value.retry_after_s == pytest.approx(10, abs=0.5)
    await stream.finish()
    await _one(where, "a", most=5800)
    assert_empty(where)


@pytest.mark.parametrize("how", ["error", "cancel"])
async def test_an_abort_settles_too(how: str) -> None:
    where = limited(tokens=1000)
    stream = Stream(where, 1000, tenant="a", used=10)
    await settle()
    if how == "cancel":
        stream.task.cancel()
        await settle()
    else:
        with pytest.raises(RuntimeError):
            await _fail(where, "b")
    tenant = "a" if how == "cancel" else "b"
    await _one(where, tenant, most=980)
    with pytest.raises(RateLimited):
        await _one(where, tenant, most=1000)
    await finish(*([] if how == "cancel" else [stream]))
    assert_empty(where)


async def _fail(where: Admission, tenant: str) -> None:
    async with where.admit(60, tenant=tenant) as permit:
        await permit.take_tokens(1000, lambda: 10)
        raise RuntimeError


async def test_who_waits_for_tokens_has_reserved_and_gets_all_back_if_refused() -> None:
    where = admission(
        tokens=10, wait_s=0.05, tenants=Tenants(default=Rate(tokens=1000, requests=2))
    )
    holder = Stream(where, 10, tenant="other")
    await settle()
    for _ in range(3):
        # A refusal uses up no request.
        with pytest.raises(QueueFull):
            await _one(where, "a", most=1000, used=0)
    await holder.finish()
    await _one(where, "a", most=1000)
    assert_empty(where)


async def test_an_empty_bucket_is_said_before_anything_is_done() -> None:
    where = limited(tokens=100)
    await _one(where, "a", most=1000, used=1000)
    late = Stream(where, 1, tenant="a")
    late.tokenized.clear()
    with pytest.raises(RateLimited) as refusal:
        await late.task
    assert not late.entered
    assert refusal.value.retry_after_s == pytest.approx(900 * 60 / 100, rel=0.02)


def _act(where: Admission, streams: list[Stream], chance: random.Random) -> None:
    act = chance.random()
    if act < 0.3 or not streams:
        most = chance.choice([1, 5, 30, 99, 100, 250])
        one = Stream(where, most, priority=chance.randint(-2, 2), tenant=chance.choice("ab"))
        if chance.random() < 0.3:
            one.tokenized.clear()
        streams.append(one)
    elif act < 0.5:
        chance.choice(streams).task.cancel()
    elif act < 0.7:
        chance.choice(streams).tokenized.set()
    else:
        chance.choice(streams).end.set()


@pytest.mark.parametrize("seed", range(25))
async def test_a_storm_of_ends_errors_and_cancels_leaves_nothing_and_never_exceeds(
    seed: int,
) -> None:
    chance = random.Random(seed)
    where = admission(
        permits=6,
        tokens=100,
        queued=chance.choice([20, 1000]),
        queued_tokens=300,
        tenants=Tenants(default=Rate(tokens=100_000, requests=chance.choice([0, 40]))),
    )
    streams: list[Stream] = []
    for _ in range(400):
        _act(where, streams, chance)
        if chance.random() < 0.6:
            await asyncio.sleep(0)
        running = [stream for stream in streams if stream.running]
        assert sum(stream.most for stream in running) <= where.tokens
        assert where.tokens <= 100 or len(running) <= 1
        assert where.running <= 6
        assert where.queued_tokens <= 300
        assert sum(where.queued_by_band.values()) == where.queued
    for stream in streams:
        stream.tokenized.set()
        stream.end.set()
    results = await asyncio.gather(*(one.task for one in streams), return_exceptions=True)
    for result in results:
        assert result is None or isinstance(result, MeshError | asyncio.CancelledError)
    assert_empty(where)
