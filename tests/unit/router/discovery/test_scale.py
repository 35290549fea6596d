"""Three thousand groups come and go: every one costs the same, and nothing of them stays."""

import gc
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from router.discovery.member import Member
from router.discovery.reconcile import Reconciler
from router.discovery.targets import GroupTarget
from router.fleet.group import Group
from tests.fakes.group_link import INFO, FakeFleet

MANY = 3000


def members(count: int) -> list[Member]:
    return [Member(key=f"u{n}@w{n}:1", address=f"w{n}:1", name=f"pod-{n}") for n in range(count)]


class Rig:
    """A fleet that a source lists."""

    def __init__(self) -> None:
        self.fake = FakeFleet()
        target = GroupTarget(self.fake.fleet, drain_s=0)
        self.reconciler: Reconciler[Group] = Reconciler(target)

    def come(self, count: int) -> None:
        """So many are listed, and say hello."""
        self.reconciler.publish("all", members(count))
        for number in range(count):
            link = self.fake.links[f"w{number}"]
            link.up(incarnation=number + 1, info=replace(INFO, model=f"m{number % 3}"))
            link.events.on_up(f"instance-{number}", is_new=True)
            link.holds(0, [number + 1], incarnation=number + 1)

    def go(self) -> None:
        """None is listed any more."""
        self.reconciler.publish("all", [])
        self.fake.links.clear()
        for _ in range(3):
            self.fake.fleet.tick()  # sweeps the tree


def calls_of(work: Callable[[], None]) -> int:
    """How many calls of functions, ours and Python's, some work makes."""
    count = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.timeout(60)
def test_every_group_costs_the_same_however_many_there_are() -> None:
    costs = {}
    for count in (MANY // 3, MANY):
        rig = Rig()
        come = calls_of(lambda rig=rig, count=count: rig.come(count))  # type: ignore[misc]
        assert len(rig.fake.fleet.groups) == count
        go = calls_of(rig.go)
        assert len(rig.fake.fleet.groups) == 0
        costs[count] = come / count, go / count
    few, many = costs[MANY // 3], costs[MANY]
    assert many[0] < 1.1 * few[0]
    assert many[1] < 1.1 * few[1]


def held() -> int:
    """Bytes of everything that is alive."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.timeout(60)
def test_nothing_of_groups_stays_that_have_gone() -> None:
    tracemalloc.start()
    try:
        rig = Rig()
        rig.come(MANY)
        rig.go()  # tables that stay to be used again have their size now
        before = held()
        rig.come(MANY)
        while_there = held() - before
        rig.go()
        left = held() - before
    finally:
        tracemalloc.stop()
    fleet = rig.fake.fleet
    assert (len(fleet.groups), len(fleet.tree), fleet.models()) == (0, 0, [])
    assert while_there > 1_000 * MANY
    assert left < 30 * MANY
