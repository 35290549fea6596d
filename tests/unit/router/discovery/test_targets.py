"""Members join a fleet and pools; what is theirs is known by itself, not by its name."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from radixmesh.errors import GroupExists
from router.discovery.member import Member
from router.discovery.targets import GroupTarget, PoolTarget
from router.text.pool import OnChange, Pool, Serving
from tests.fakes.fleet import ask
from tests.fakes.group_link import FakeFleet

WANTED = Serving("tiny", "f1")


@dataclass(eq=False)
class Instance:
    address: str
    serving: Serving | None = WANTED
    load: int = 0
    pending_bytes: int = 0
    shunned: bool = False
    on_change: OnChange = lambda *, up: None
    running: bool = False

    async def run(self) -> None:
        self.running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.running = False


def member(address: str, name: str = "") -> Member:
    return Member(key=address, address=address, name=name)


def pooled() -> tuple[Pool[Instance], PoolTarget[Instance]]:
    pool: Pool[Instance] = Pool("tokenizer", rng=random.Random(1), on_lost=lambda: None)
    return pool, PoolTarget(pool, Instance)


def test_a_name_that_is_taken_becomes_a_longer_one() -> None:
    fake = FakeFleet("w")
    target = GroupTarget(fake.fleet, drain_s=5)
    group = target.join(member("h:1", "w"))
    assert group.group_id == "w@h:1"
    with pytest.raises(GroupExists):
        target.join(member("h:1", "v"))


def test_a_group_of_the_same_name_is_not_the_same_group() -> None:
    fake = FakeFleet()
    target = GroupTarget(fake.fleet, drain_s=5)
    group = target.join(member("h:1", "w"))
    fake.fleet.remove_group("w")
    fake.fleet.add_group("h:1", "w")
    assert not target.present(group)


def test_what_an_administrator_wants_of_a_group_outlives_what_its_source_says() -> None:
    fake = FakeFleet()
    target = GroupTarget(fake.fleet, drain_s=5)
    group = target.join(member("h:1", "w"))
    fake.links["h"].up()
    booking = fake.fleet.place(ask(range(20)))
    fake.fleet.drain_group("w", remove=True)
    target.drain(group)
    booking.release()
    fake.fleet.tick()
    assert not target.present(group)


def test_an_instance_that_is_drained_is_asked_only_when_there_is_no_other() -> None:
    pool, target = pooled()
    one, other = target.join(member("a:1")), target.join(member("b:1"))
    target.drain(one)
    assert {pool.choose(WANTED) for _ in range(20)} == {other}
    other.serving = None
    assert pool.choose(WANTED) is one
    other.serving = WANTED
    target.undrain(one)
    assert {pool.choose(WANTED) for _ in range(40)} == {one, other}


def test_an_idle_instance_that_is_listed_no_more_is_gone_at_once() -> None:
    pool, target = pooled()
    one = target.join(member("a:1"))
    target.retire(one)
    assert not target.present(one)
    assert pool.choose(WANTED) is None


async def test_a_busy_one_leaves_when_it_has_answered() -> None:
    pool, target = pooled()
    running = asyncio.create_task(pool.run())
    one = target.join(member("a:1"))
    await asyncio.sleep(0)
    one.load = 1
    target.retire(one)
    await asyncio.sleep(0.01)
    assert target.present(one)
    assert one.running
    one.load = 0
    async with asyncio.timeout(5):
        while one.running:  # noqa: ASYNC110 - it looks twice a second
            await asyncio.sleep(0.01)
    assert len(pool) == 0
    running.cancel()
    await asyncio.wait([running])


async def test_one_that_comes_back_before_it_left_stays() -> None:
    pool, target = pooled()
    one = target.join(member("a:1"))
    one.load = 1
    target.retire(one)
    assert target.join(member("a:1")) is one
    with pytest.raises(GroupExists):
        target.join(member("a:1"))
    assert pool.choose(WANTED) is one


async def test_one_that_is_taken_out_ends_its_link_and_others_come_while_it_runs() -> None:
    pool, target = pooled()
    one = target.join(member("a:1"))
    running = asyncio.create_task(pool.run())
    await asyncio.sleep(0.01)
    other = target.join(member("b:1"))
    await asyncio.sleep(0.01)
    assert (one.running, other.running) == (True, True)
    target.remove(one)
    await asyncio.sleep(0.01)
    assert (one.running, other.running) == (False, True)
    running.cancel()
    await asyncio.wait([running])
    assert not other.running
