"""Who is in the fleet: drained, handed over, removed, undrained, and met at two addresses."""

import asyncio
from dataclasses import replace

import pytest

from radixmesh.errors import Draining, GroupExists, GroupNotFound, ModelNotServed, NoReplicaReady
from router.fleet.views import Phase
from tests.fakes.fleet import Output, ask, spec
from tests.fakes.group_link import INFO, FakeFleet, FakeGroupLink

PROMPT = list(range(100, 134))


def up(fake: FakeFleet, **instances: str) -> None:
    """Bring groups up as these processes."""
    for name, instance_id in instances.items():
        link = fake.links[name]
        link.up()
        link.events.on_up(instance_id, is_new=True)
        link.events.on_frame_end()


def send(fake: FakeFleet, number: int = 0) -> tuple[str, Output]:
    """Send one output of a prompt that no other number has; return the group that has it."""
    output, prompt = Output(), [1000 * number + each for each in PROMPT]
    booking = fake.fleet.place(ask(prompt))
    fake.fleet.submit(booking, spec(prompt), output)
    return booking.group_id, output


def reasons(fake: FakeFleet) -> dict[str, str]:
    return {view.group_id: view.reason for view in fake.fleet.replicas()}


def test_a_drained_group_gets_nothing_new_and_keeps_what_it_has() -> None:
    fake = FakeFleet("a")
    up(fake, a="1")
    _, output = send(fake)
    assert fake.fleet.drain_group("a") == 1
    with pytest.raises(NoReplicaReady):
        fake.fleet.place(ask(PROMPT))
    fake.clock.advance(1e6)
    fake.fleet.tick()
    assert output.ends == 0
    assert reasons(fake) == {"a": "draining"}


def test_a_group_added_again_is_undrained() -> None:
    fake = FakeFleet("a")
    up(fake, a="1")
    fake.fleet.drain_group("a", remove=False)
    assert fake.fleet.add_group("a:1", "a") == "a"
    assert send(fake)[0] == "a"
    assert reasons(fake) == {"a": ""}


def test_one_that_is_undrained_does_not_leave_later() -> None:
    fake = FakeFleet("a")
    up(fake, a="1")
    _, output = send(fake)
    fake.fleet.drain_group("a", remove=True, within_s=5)
    fake.fleet.add_group("a:1", "a")
    fake.clock.advance(10)
    fake.fleet.tick()
    assert output.ends == 0
    assert fake.fleet.groups.find("a")


@pytest.mark.parametrize(("address", "name"), [("a:1", "b"), ("b:1", "a")])
def test_a_drained_group_is_not_undrained_by_another_one(address: str, name: str) -> None:
    fake = FakeFleet("a")
    fake.fleet.drain_group("a")
    with pytest.raises(GroupExists):
        fake.fleet.add_group(address, name)


@pytest.mark.parametrize(("address", "name"), [("a:1", "a"), ("a:1", "b"), ("b:1", "a")])
def test_a_name_and_an_address_are_in_the_fleet_once(address: str, name: str) -> None:
    fake = FakeFleet("a")
    with pytest.raises(GroupExists):
        fake.fleet.add_group(address, name)
    fake.fleet.remove_group("a")
    assert fake.fleet.add_group(address, name) == name


def test_what_outlasts_the_drain_is_handed_over_and_the_group_stays() -> None:
    fake = FakeFleet("a")
    up(fake, a="1")
    _, output = send(fake)
    fake.fleet.drain_group("a", within_s=5)
    fake.clock.advance(4.9)
    fake.fleet.tick()
    assert output.ends == 0
    fake.clock.advance(0.1)
    fake.fleet.tick()
    assert isinstance(output.error, Draining)
    assert fake.fleet.replicas()[0].in_flight == 0
    fake.fleet.tick()
    assert output.ends == 1
    assert fake.fleet.replicas()[0].phase is Phase.DRAINING


def test_a_group_that_is_to_leave_goes_when_its_last_output_ends() -> None:
    fake = FakeFleet("a", "b")
    up(fake, a="1")
    send(fake)
    fake.fleet.drain_group("a", remove=True)
    fake.fleet.tick()
    assert fake.fleet.groups.find("a")
    link = fake.links["a"]
    link.fail_replica(0, None, Draining("over"))
    fake.fleet.tick()
    assert fake.fleet.groups.find("a") is None
    with pytest.raises(GroupNotFound):
        fake.fleet.drain_group("a")


def test_an_idle_group_that_is_to_leave_is_gone_at_once() -> None:
    fake = FakeFleet("a")
    up(fake, a="1")
    assert fake.fleet.drain_group("a", remove=True) == 0
    assert len(fake.fleet.groups) == 0


def test_a_booked_place_counts_as_something_that_runs_there() -> None:
    fake = FakeFleet("a")
    up(fake, a="1")
    booking = fake.fleet.place(ask(PROMPT))
    fake.fleet.drain_group("a", remove=True)
    fake.fleet.tick()
    assert fake.fleet.groups.find("a")
    booking.release()
    fake.fleet.tick()
    assert fake.fleet.groups.find("a") is None


def test_one_process_at_two_addresses_gets_its_work_at_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeFleet("a", "b")
    up(fake, a="same", b="same")
    assert {send(fake, number)[0] for number in range(20)} == {"a"}
    assert reasons(fake) == {"a": "", "b": "the same process as group a"}
    assert [record.message for record in caplog.records].count(
        "the same worker group at two addresses"
    ) == 1


def test_other_processes_are_no_duplicates_nor_are_those_that_have_no_name() -> None:
    fake = FakeFleet("a", "b", "c", "d")
    up(fake, a="1", b="2", c="", d="")
    assert {send(fake, number)[0] for number in range(60)} == {"a", "b", "c", "d"}


@pytest.mark.parametrize("how", ["lost", "removed", "drained"])
def test_the_second_address_takes_over_when_the_first_goes(how: str) -> None:
    fake = FakeFleet("a", "b")
    up(fake, a="same", b="same")
    if how == "lost":
        fake.links["a"].events.on_down(Draining("gone"))
    elif how == "removed":
        fake.fleet.remove_group("a")
    else:
        fake.fleet.drain_group("a")
    assert send(fake)[0] == "b"
    assert reasons(fake)["b"] == ""


def test_a_duplicate_that_becomes_another_process_gets_work_of_its_own() -> None:
    fake = FakeFleet("a", "b")
    up(fake, a="same", b="same")
    fake.links["b"].events.on_down(Draining("restarts"))
    up(fake, b="other")
    assert {send(fake, number)[0] for number in range(40)} == {"a", "b"}


async def test_a_group_of_the_same_name_is_not_hurt_by_the_end_of_the_old_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(self: FakeGroupLink) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(FakeGroupLink, "run", run)
    fake = FakeFleet("a")
    async with asyncio.TaskGroup() as tasks:
        fake.fleet.groups.start(tasks)
        up(fake, a="1")
        fake.fleet.remove_group("a")
        fake.fleet.add_group("a:1", "a")
        up(fake, a="2")
        for _ in range(5):
            await asyncio.sleep(0)  # the old link ends meanwhile
        assert send(fake)[0] == "a"
        assert [model.ready_replicas for model in fake.fleet.models()] == [1]
        fake.fleet.remove_group("a")


def test_a_model_is_known_while_a_group_of_it_is_away_and_unknown_when_the_last_one_left() -> None:
    fake = FakeFleet("a", "b")
    up(fake, a="1")
    fake.links["b"].up(info=replace(INFO, model="other"))
    fake.links["a"].events.on_down(Draining("away"))
    with pytest.raises(NoReplicaReady) as away:
        fake.fleet.place(ask(PROMPT))
    assert away.value.retry_after_s
    fake.fleet.remove_group("a")
    with pytest.raises(ModelNotServed):
        fake.fleet.place(ask(PROMPT))
    with pytest.raises(ModelNotServed):
        fake.fleet.limits("tiny")
    assert [model.name for model in fake.fleet.models()] == ["other"]


def test_without_any_group_nobody_is_ready() -> None:
    fake = FakeFleet("a")
    up(fake, a="1")
    fake.fleet.remove_group("a")
    with pytest.raises(NoReplicaReady) as nobody:
        fake.fleet.limits("tiny")
    assert nobody.value.retry_after_s


def test_models_have_trees_of_their_own() -> None:
    fake = FakeFleet("a", "b")
    up(fake, a="1")
    fake.links["b"].up(info=replace(INFO, model="other"))
    send(fake)
    for model, group in (("tiny", "a"), ("other", "b")):
        [quote] = fake.fleet.explain(ask(PROMPT, model=model))
        assert quote.group_id == group
        assert quote.matched_blocks == (8 if model == "tiny" else 0)
