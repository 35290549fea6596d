"""From lists to joins, drains and leaves."""

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.errors import GroupExists
from router.discovery.member import Member
from router.discovery.reconcile import Reconciler


@dataclass(eq=False)
class Joined:
    """One that is in the target."""

    name: str
    address: str
    busy: bool = False
    drained: bool = False
    leaving: bool = False


@dataclass
class FakeTarget:
    """A fleet: names and addresses once; who is busy does not leave by itself."""

    there: dict[str, Joined] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    made: "itertools.count[int]" = field(default_factory=itertools.count)

    def join(self, member: Member) -> Joined:
        self.calls.append(f"join {member.key}")
        name = member.name or member.address
        known = self.there.get(name)
        if known and known.drained and known.address == member.address:
            known.drained = known.leaving = False
            return known
        if known or any(member.address == one.address for one in self.there.values()):
            raise GroupExists("somebody is there")
        joined = self.there[name] = Joined(name, member.address)
        return joined

    def present(self, token: Joined) -> bool:
        return self.there.get(token.name) is token

    def drain(self, token: Joined) -> None:
        assert self.present(token)
        self.calls.append(f"drain {token.name}")
        token.drained = True

    def undrain(self, token: Joined) -> None:
        assert self.present(token)
        self.calls.append(f"undrain {token.name}")
        token.drained = False

    def retire(self, token: Joined) -> None:
        assert self.present(token)
        self.calls.append(f"retire {token.name}")
        if token.busy:
            token.drained = token.leaving = True
        else:
            del self.there[token.name]

    def remove(self, token: Joined) -> None:
        assert self.present(token)
        self.calls.append(f"remove {token.name}")
        del self.there[token.name]


def member(key: str, *, address: str = "", name: str = "", draining: bool = False) -> Member:
    return Member(key=key, address=address or f"{key}:1", name=name, draining=draining)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
def reconciler(target: FakeTarget) -> Reconciler[Joined]:
    return Reconciler(target)


def test_only_differences_are_done(target: FakeTarget, reconciler: Reconciler[Joined]) -> None:
    reconciler.publish("file", [member("a"), member("b")])
    reconciler.publish("file", [member("a"), member("b")])
    reconciler.publish("file", [member("b"), member("c")])
    assert target.calls == ["join a", "join b", "retire a:1", "join c"]
    assert set(target.there) == {"b:1", "c:1"}


def test_a_member_stays_while_one_source_lists_it(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    reconciler.publish("file", [member("a")])
    reconciler.publish("dns", [member("a"), member("b")])
    reconciler.publish("file", [])
    assert set(target.there) == {"a:1", "b:1"}
    reconciler.publish("dns", [])
    assert not target.there


def test_what_was_added_by_hand_stays_whatever_sources_say(
    target: FakeTarget, reconciler: Reconciler[Joined], caplog: pytest.LogCaptureFixture
) -> None:
    by_hand = target.there["a:1"] = Joined("a:1", "a:1")
    for _ in range(3):
        reconciler.publish("file", [member("a")])
    reconciler.publish("file", [])
    assert target.there == {"a:1": by_hand}
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_what_was_removed_by_hand_stays_away_until_it_was_not_listed(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    reconciler.publish("file", [member("a")])
    target.there.clear()
    reconciler.publish("file", [member("a"), member("b")])
    assert set(target.there) == {"b:1"}
    reconciler.publish("file", [member("b")])
    reconciler.publish("file", [member("a"), member("b")])
    assert set(target.there) == {"a:1", "b:1"}


def test_what_was_removed_and_added_by_hand_is_no_longer_the_sources(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    reconciler.publish("file", [member("a")])
    by_hand = target.there["a:1"] = Joined("a:1", "a:1")
    reconciler.publish("file", [member("a", draining=True)])
    reconciler.publish("file", [])
    assert target.there == {"a:1": by_hand}
    assert not by_hand.drained


def test_one_that_could_not_join_does_when_its_place_is_free(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    target.there["a:1"] = Joined("a:1", "a:1")
    reconciler.publish("dns", [member("a")])
    target.there.clear()
    reconciler.publish("dns", [member("a")])
    reconciler.publish("dns", [])
    assert target.calls[-2:] == ["join a", "retire a:1"]


def test_one_that_is_about_to_go_is_drained_at_once_and_may_come_back(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    reconciler.publish("k8s", [member("a")])
    reconciler.publish("k8s", [member("a", draining=True)])
    reconciler.publish("k8s", [member("a", draining=True)])
    assert target.there["a:1"].drained
    reconciler.publish("k8s", [member("a")])
    assert target.calls == ["join a", "drain a:1", "undrain a:1"]


def test_one_that_is_about_to_go_when_it_is_seen_first_does_not_join(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    reconciler.publish("k8s", [member("a", draining=True)])
    assert target.calls == []


def test_one_that_is_back_before_it_left_is_the_same(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    reconciler.publish("dns", [member("a")])
    joined = target.there["a:1"]
    joined.busy = True
    reconciler.publish("dns", [])
    assert joined.leaving
    reconciler.publish("dns", [member("a")])
    assert target.there == {"a:1": joined}
    assert not joined.drained


@pytest.mark.parametrize("at_once", [True, False])
def test_an_address_that_goes_to_another_makes_the_old_one_leave_at_once(
    target: FakeTarget, reconciler: Reconciler[Joined], at_once: bool
) -> None:
    old = member("uid1", address="ip:1", name="pod-1")
    new = member("uid2", address="ip:1", name="pod-2")
    reconciler.publish("k8s", [old])
    target.there["pod-1"].busy = True
    if not at_once:
        reconciler.publish("k8s", [])
    reconciler.publish("k8s", [new])
    assert list(target.there) == ["pod-2"]
    assert target.calls[-2:] == ["remove pod-1", "join uid2"]


def test_a_name_that_comes_again_at_another_address_is_another_one(
    target: FakeTarget, reconciler: Reconciler[Joined]
) -> None:
    reconciler.publish("k8s", [member("uid1", address="ip1:1", name="worker-0")])
    target.there["worker-0"].busy = True
    reconciler.publish("k8s", [member("uid2", address="ip2:1", name="worker-0")])
    assert target.there["worker-0"].address == "ip2:1"


KEYS = st.sampled_from("abcde")
LISTS = st.dictionaries(KEYS, st.booleans(), max_size=5)


@given(steps=st.lists(st.tuples(st.sampled_from(["one", "two"]), LISTS, KEYS), max_size=12))
def test_the_target_is_the_union_of_what_all_list(
    steps: list[tuple[str, Mapping[str, bool], str]],
) -> None:
    target = FakeTarget()
    reconciler: Reconciler[Joined] = Reconciler(target)
    listed: dict[str, Mapping[str, bool]] = {}
    for source, members, busy in steps:
        listed[source] = dict.fromkeys(members, False)
        reconciler.publish(source, [member(key) for key in members])
        wanted = {f"{key}:1" for names in listed.values() for key in names}
        staying = {name for name, one in target.there.items() if not one.leaving}
        assert staying == wanted
        assert len(reconciler) == len(wanted)
        if f"{busy}:1" in target.there:
            target.there[f"{busy}:1"].busy = members.get(busy, False)
