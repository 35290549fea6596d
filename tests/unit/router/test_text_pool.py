"""Which instance of a text service is asked."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from radixmesh.errors import ServiceUnavailable, TokenizerMismatch
from router.text.pool import OnChange, Pool, Serving

WANTED = Serving("tiny", "f1")


@dataclass(eq=False)
class Instance:
    address: str = "here:1"
    serving: Serving | None = None
    load: int = 0
    pending_bytes: int = 0
    shunned: bool = False
    on_change: OnChange = lambda *, up: None

    async def run(self) -> None:
        await asyncio.Event().wait()


def pool(*instances: Instance) -> Pool[Instance]:
    lost: list[int] = []
    made: Pool[Instance] = Pool("tokenizer", rng=random.Random(1), on_lost=lambda: lost.append(1))
    for instance in instances:
        made.add(instance)
    return made


def test_the_least_loaded_is_chosen_and_ties_are_random() -> None:
    idle = [Instance(serving=WANTED), Instance(serving=WANTED)]
    busy = Instance(serving=WANTED, load=1)
    instances = pool(busy, *idle)
    chosen = {id(instances.choose(WANTED)) for _ in range(50)}
    assert chosen == {id(one) for one in idle}


def test_one_that_failed_a_moment_ago_is_asked_only_when_it_is_the_only_one() -> None:
    failed, busy = Instance(serving=WANTED), Instance(serving=WANTED, load=9)
    instances = pool(failed, busy)
    assert instances.choose(WANTED, avoid=[failed]) is busy
    busy.serving = None
    assert instances.choose(WANTED, avoid=[failed]) is failed


def test_one_that_was_silent_is_asked_only_when_it_is_the_only_one() -> None:
    silent, failed = Instance(serving=WANTED, shunned=True), Instance(serving=WANTED, load=9)
    instances = pool(silent, failed)
    assert instances.choose(WANTED) is failed
    assert instances.choose(WANTED, avoid=[failed]) is silent
    failed.serving = None
    assert instances.choose(WANTED) is silent


def test_one_that_is_not_connected_or_serves_another_model_is_not_asked() -> None:
    instances = pool(Instance(), Instance(serving=Serving("other", "f9")))
    assert instances.choose(WANTED) is None


def test_another_tokenizer_for_the_same_model_is_a_mismatch() -> None:
    instances = pool(Instance(serving=Serving("tiny", "f2")))
    with pytest.raises(TokenizerMismatch):
        instances.choose(WANTED)
    fits = Instance(serving=WANTED)
    instances.add(fits)
    assert instances.choose(WANTED) is fits


async def test_a_request_waits_for_one_to_connect() -> None:
    late = Instance()
    instances = pool(late)
    waiting = asyncio.create_task(instances.acquire(WANTED, wait_s=5))
    await asyncio.sleep(0)
    late.serving = WANTED
    late.on_change(up=True)
    assert await waiting is late


async def test_a_wait_for_nobody_ends_in_a_typed_refusal() -> None:
    with pytest.raises(ServiceUnavailable) as refusal:
        await pool(Instance()).acquire(WANTED, wait_s=0.01)
    assert refusal.value.retry_after_s


async def test_a_wait_for_a_tokenizer_that_fits_ends_in_a_mismatch() -> None:
    with pytest.raises(TokenizerMismatch):
        await pool(Instance(serving=Serving("tiny", "f2"))).acquire(WANTED, wait_s=0.01)


async def test_a_cancelled_wait_leaves_nothing() -> None:
    late = Instance()
    instances = pool(late)
    waiting = asyncio.create_task(instances.acquire(WANTED, wait_s=5))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    late.serving = WANTED
    late.on_change(up=True)
    assert await instances.acquire(WANTED, wait_s=0) is late
