"""When a router wants traffic."""

from dataclasses import dataclass

import pytest

from router.fleet.replica import SNAPSHOT_GRACE_S
from router.readiness import Readiness
from tests.fakes.group_link import FakeFleet


@dataclass
class Lists:
    listed: bool = True


@dataclass
class Texts:
    known: int = 0
    connected: int = 0

    def __len__(self) -> int:
        return self.known


def readiness(fake: FakeFleet, *texts: Texts, lists: Lists | None = None) -> Readiness:
    return Readiness(lists or Lists(), fake.fleet.groups, texts, clock=fake.clock)


def test_it_waits_for_the_first_list_however_long() -> None:
    fake, lists = FakeFleet(), Lists(listed=False)
    ready = readiness(fake, lists=lists)
    fake.clock.advance(1000)
    assert not ready.check()
    lists.listed = True
    assert ready.check()


def test_without_any_group_it_is_ready() -> None:
    assert readiness(FakeFleet()).check()


def test_it_waits_for_the_snapshots_of_all_that_were_listed_then() -> None:
    fake = FakeFleet("a", "b")
    ready = readiness(fake)
    assert not ready.check()
    fake.links["a"].up()
    assert not ready.check()
    fake.fleet.add_group("c:1", "c")  # later, so not waited for
    fake.links["b"].up()
    assert ready.check()


@pytest.mark.parametrize("how", ["late", "removed"])
def test_it_does_not_wait_for_ever_nor_for_who_has_left(how: str) -> None:
    fake = FakeFleet("a")
    ready = readiness(fake)
    assert not ready.check()
    if how == "late":
        fake.clock.advance(SNAPSHOT_GRACE_S)
    else:
        fake.fleet.remove_group("a")
    assert ready.check()


def test_it_stays_ready_whatever_comes_and_goes() -> None:
    fake = FakeFleet("a")
    fake.links["a"].up()
    texts = Texts(known=1, connected=1)
    ready = readiness(fake, texts)
    assert ready.check()
    texts.connected = 0
    fake.fleet.add_group("b:1", "b")
    fake.fleet.remove_group("a")
    assert ready.check()


def test_of_each_text_service_that_is_known_one_is_waited_for_and_not_for_ever() -> None:
    for late in (False, True):
        fake = FakeFleet()
        one, other = Texts(known=2), Texts(known=0)
        ready = readiness(fake, one, other)
        assert not ready.check()
        if late:
            fake.clock.advance(SNAPSHOT_GRACE_S)
        else:
            one.connected = 1
        assert ready.check()
