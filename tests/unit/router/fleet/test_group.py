"""What a router knows of a group follows what the group says: replicas come, go, and change."""

from dataclasses import replace

from radixmesh.blocks import Namespace, block_keys, pack_ids
from router.fleet.changes import Chunk, Digest, Stored
from router.fleet.group import Group
from router.fleet.replica import Reported
from router.fleet.workload import Report
from tests.fakes.fleet import ask
from tests.fakes.group_link import INFO, FakeFleet, FakeGroupLink

PROMPT = list(range(100, 134))


def two_replicas() -> tuple[FakeFleet, FakeGroupLink]:
    fake = FakeFleet("a")
    link = fake.links["a"]
    link.up(dp=2, info=replace(INFO, dp=2))
    return fake, link


def retire(link: FakeGroupLink) -> None:
    link.events.on_status(1, 1, Reported.DRAINING)
    link.events.on_status(1, 1, Reported.DOWN)
    link.events.on_info(INFO)


def ranks(fake: FakeFleet) -> list[int]:
    return [view.dp_rank for view in fake.fleet.replicas()]


def test_a_replica_that_retired_is_forgotten_with_its_blocks() -> None:
    fake, link = two_replicas()
    link.holds(1, [5, 6])
    assert len(fake.tree) == 2
    retire(link)
    assert ranks(fake) == [0]
    fake.tree.sweep(1_000)
    assert len(fake.tree) == 0


def test_a_feed_that_comes_after_its_replica_retired_does_not_bring_it_back() -> None:
    fake, link = two_replicas()
    retire(link)
    link.events.on_chunk(1, 1, Chunk(0, [5], [0], first=True, last=True))
    link.events.on_change(1, 1, 1, Stored(0, [7]))
    link.events.on_digest(1, 1, Digest(1, 1, 7))
    assert ranks(fake) == [0]
    assert all(fake.fleet.place(ask(PROMPT)).dp_rank == 0 for _ in range(8))


def test_a_replica_that_is_added_gets_requests_once_its_cache_is_known() -> None:
    fake = FakeFleet("a")
    link = fake.links["a"]
    link.up()
    link.events.on_info(replace(INFO, dp=2))
    link.events.on_status(1, 0, Reported.DOWN)
    assert {fake.fleet.place(ask([n] * 34)).dp_rank for n in range(8)} == {0}
    link.events.on_status(1, 9, Reported.UP)
    link.holds(1, (), incarnation=9)
    link.events.on_report(1, 9, Report(free_blocks=INFO.kv_blocks))
    assert ranks(fake) == [0, 1]
    assert 1 in {fake.fleet.place(ask([n] * 34)).dp_rank for n in range(8, 24)}


def test_a_retired_replica_that_comes_back_is_a_new_one() -> None:
    fake, link = two_replicas()
    retire(link)
    link.events.on_info(replace(INFO, dp=2))
    link.events.on_status(1, 2, Reported.UP)
    link.holds(1, [5], incarnation=2)
    assert ranks(fake) == [0, 1]
    [group] = fake.fleet.groups
    assert isinstance(group, Group)
    assert group.replicas[1].incarnation == 2


def test_after_a_change_of_weights_prompts_are_looked_up_under_the_new_ones() -> None:
    fake = FakeFleet("a")
    link = fake.links["a"]
    link.up()

    def keys(version: str) -> list[int]:
        name = Namespace(model="tiny", weight_version=version, fingerprint="f1")
        return block_keys(pack_ids(PROMPT), block_tokens=4, seed=name.seed())

    link.holds(0, keys(""))
    assert fake.fleet.place(ask(PROMPT)).predicted_blocks == 8
    link.events.on_info(replace(INFO, weight_version="w2"))
    assert fake.fleet.place(ask(PROMPT)).predicted_blocks == 0
    link.holds(0, keys("w2"))
    assert fake.fleet.place(ask(PROMPT)).predicted_blocks == 8
