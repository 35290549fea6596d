"""The way of a request whose services die: its stream goes on where it was, or ends once."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import fields, replace

import pytest

from radixmesh.errors import (
    Draining,
    GroupLost,
    LinkLost,
    MeshError,
    NoReplicaReady,
    QueueFull,
    RankDesync,
    RequestPoisoned,
    ServiceUnavailable,
)
from router.fleet.ask import SubmitSpec
from router.pipeline import Pace
from router.request import Sampling
from router.text.detokenizers import DecodeOptions
from tests.fakes.pipeline_mesh import PROMPT, Mesh, ask, collect, failure, kill_serving_replica
from tests.fakes.small_mesh import SmallFleet, expected_text


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


@pytest.mark.parametrize("error", [GroupLost, LinkLost, Draining, RankDesync])
async def test_a_stream_whose_replica_is_lost_goes_on_at_the_next_position(
    mesh: Mesh, error: type[MeshError]
) -> None:
    mesh.script = kill_serving_replica(mesh, {8}, error)
    got = await collect(mesh, ask(40))
    assert got.texts == {0: expected_text(PROMPT, 40)}
    first, second = mesh.fleet.specs
    assert first.output_ids == b""
    assert 0 < len(second.output_ids) // 4 < 40
    assert second.prompt_ids == first.prompt_ids
    assert mesh.fleet.asks[1].resume
    assert got.finishes[0].receipt.attempts == 2
    assert mesh.losses == [("worker", error.reason)]
    mesh.assert_nothing_is_held()


async def test_a_receipt_says_where_an_output_began_and_where_it_ended(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            mesh.fleet.kill(mesh.fleet.entries[0].replica)

    mesh.script = script
    receipt = (await collect(mesh, ask(40))).finishes[0].receipt
    assert (receipt.group_id, receipt.last_group_id) == ("g0", "g1")


async def test_a_dead_replica_is_avoided_and_a_cut_link_is_not(mesh: Mesh) -> None:
    mesh.script = kill_serving_replica(mesh, {5})
    await collect(mesh, ask(20))
    assert mesh.fleet.asks[1].avoid
    mesh.script = kill_serving_replica(mesh, {mesh.steps + 5}, LinkLost)
    await collect(mesh, ask(20))
    assert not mesh.fleet.asks[3].avoid


async def test_a_stream_waits_for_a_replica_to_come_back(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica)
        if step == 60:
            assert mesh.fleet.waiting == 1
            mesh.fleet.revive(mesh.fleet.replicas[0])

    mesh.script = script
    got = await collect(mesh, ask(40))
    assert got.texts == {0: expected_text(PROMPT, 40)}


async def test_a_stream_that_nobody_takes_over_in_time_ends_unavailable(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica)

    mesh.script = script
    pace = Pace(resume_wait_s=0.05, stream_interval_s=0)
    refusal = await failure(mesh, ask(40), pace)
    assert isinstance(refusal, NoReplicaReady)
    mesh.assert_nothing_is_held()


async def test_a_router_that_ends_tells_its_clients_and_holds_nothing(mesh: Mesh) -> None:
    pipeline = mesh.pipeline()
    async with mesh.running(), aclosing(pipeline.generate(ask(40))) as events:
        await anext(events)
        pipeline.end(Draining("the router stops"))
        with pytest.raises(Draining):
            async for _ in events:
                pass
    mesh.assert_nothing_is_held()


async def test_new_work_waits_a_moment_for_a_replica_then_is_refused(mesh: Mesh) -> None:
    for replica in mesh.fleet.replicas:
        mesh.fleet.kill(replica)
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, NoReplicaReady)
    assert refusal.retry_after_s


async def test_a_request_that_takes_down_two_replicas_is_poison(mesh: Mesh) -> None:
    def script(step: int) -> None:
        for replica in mesh.fleet.replicas:
            if any(entry.started for entry in replica.entries):
                mesh.fleet.kill(replica)
                mesh.fleet.revive(replica)

    mesh.script = script
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, RequestPoisoned)
    assert len(mesh.fleet.specs) == 2
    mesh.assert_nothing_is_held()


async def test_cut_links_are_no_poison(mesh: Mesh) -> None:
    mesh.script = kill_serving_replica(mesh, {10, 20, 30, 40}, LinkLost)
    got = await collect(mesh, ask(60))
    assert got.texts == {0: expected_text(PROMPT, 60)}
    assert got.finishes[0].receipt.attempts == 5


@pytest.mark.parametrize(("error", "attempts"), [(LinkLost, 2), (Draining, 1)])
async def test_a_place_counts_where_an_output_may_have_run_though_nobody_heard_so(
    mesh: Mesh, error: type[MeshError], attempts: int
) -> None:
    """The first attempt is sent and lost before anything came back."""

    def script(step: int) -> None:
        del step
        if len(mesh.fleet.specs) == 1:
            for entry in mesh.fleet.entries:
                entry.fail(error("lost"))

    mesh.script = script
    got = await collect(mesh, ask(12))
    assert len(mesh.fleet.specs) == 2
    assert got.finishes[0].receipt.attempts == attempts


async def test_a_full_replica_sends_work_to_another(mesh: Mesh) -> None:
    mesh.fleet.replicas[0].full = True
    got = await collect(mesh, ask())
    assert got.texts == {0: expected_text(PROMPT, 12)}
    assert [spec.output_ids for spec in mesh.fleet.specs] == [b"", b""]
    assert got.finishes[0].receipt.attempts == 1
    assert got.finishes[0].receipt.group_id == "g1"


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_full_fleet_is_the_clients_to_back_off_from(size: int) -> None:
    mesh = Mesh(fleet=SmallFleet(size))
    for replica in mesh.fleet.replicas:
        replica.full = True
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after_s
    assert len(mesh.fleet.specs) == min(size, 2)
    mesh.assert_nothing_is_held()


async def test_a_stream_does_not_end_because_the_fleet_is_full_for_a_while(mesh: Mesh) -> None:
    lost = asyncio.get_running_loop().create_future()

    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                replica.full = True
            kill_serving_replica(mesh, {8})(8)
        if len(mesh.fleet.specs) >= 4:
            for replica in mesh.fleet.replicas:
                replica.full = False
            lost.cancel()

    mesh.script = script
    got = await collect(mesh, ask(40))
    assert lost.cancelled()
    assert got.texts == {0: expected_text(PROMPT, 40)}


async def test_a_lost_detokenizer_gets_a_successor_that_replays(mesh: Mesh) -> None:
    mesh.script = lambda step: mesh.decoder.kill() if step in {3, 9, 10, 25} else None
    got = await collect(mesh, ask(40))
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert got.ids[0] == list(got.texts[0].encode())
    assert mesh.decoder.opened == 5
    assert mesh.losses.count(("detokenizer", "LINK_LOST")) == 4
    mesh.assert_nothing_is_held()


async def test_a_detokenizer_lost_after_the_last_id_still_ends_the_stream(mesh: Mesh) -> None:
    def script(step: int) -> None:
        mesh.decoder.paused = mesh.decoder.opened == 1
        if not mesh.fleet.entries and mesh.fleet.specs and mesh.decoder.paused:
            mesh.decoder.kill()

    mesh.script = script
    got = await collect(mesh, ask(6))
    assert got.texts == {0: expected_text(PROMPT, 6)}
    assert mesh.decoder.opened == 2


async def test_detokenizers_that_die_of_an_output_end_it(mesh: Mesh) -> None:
    mesh.script = lambda step: mesh.decoder.kill()
    refusal = await failure(mesh, ask(1000 // 4))
    assert isinstance(refusal, LinkLost)
    assert mesh.decoder.opened == 4
    mesh.assert_nothing_is_held()


async def test_no_detokenizer_is_a_typed_refusal(mesh: Mesh) -> None:
    mesh.decoder.up = False
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, ServiceUnavailable)
    mesh.assert_nothing_is_held()


async def test_a_stop_string_is_found_across_a_resume(mesh: Mesh) -> None:
    whole = expected_text(PROMPT, 40)
    stop = whole[9:14]

    def script(step: int) -> None:
        text = sum(len(entry.ids) for entry in mesh.decoder.entries)
        # The first half of the stop string has been generated.
        if text == 11 and len(mesh.fleet.specs) == 1:
            kill_serving_replica(mesh, {0})(0)
            mesh.decoder.kill()

    mesh.script = script
    got = await collect(mesh, ask(40, stop=(stop,)))
    assert got.texts == {0: whole[:9]}
    assert got.finishes[0].stop_matched == stop
    assert len(mesh.fleet.specs) == 2
    mesh.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(25))
async def test_random_deaths_change_nothing_for_the_client(seed: int) -> None:
    mesh = Mesh()
    chance = random.Random(seed)
    mesh.fleet.eos_after = chance.choice([-1, 10, 33])

    def script(step: int) -> None:
        # Rare enough that every attempt makes some progress.
        if step % 9 == 8 and chance.random() < 0.7:
            kill_serving_replica(mesh, {step}, LinkLost)(step)
        if step % 5 == 3 and chance.random() < 0.7:
            mesh.decoder.kill()

    mesh.script = script
    got = await collect(mesh, ask(60, choices=2))
    count = 60 if mesh.fleet.eos_after < 0 else mesh.fleet.eos_after
    for choice in (0, 1):
        assert got.texts[choice] == expected_text(PROMPT, count)
    mesh.assert_nothing_is_held()


# What a resume goes on from: ids, and what was asked for. An attempt must depend on nothing else,
# or a resume has to be refused. Whoever adds a parameter says here that this is so for it.

PARAMETERS: dict[str, object] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "seed": 11,
    "max_tokens": 40,
    "min_tokens": 30,
    "stop_token_ids": (1,),
    "ignore_eos": True,
    "logprobs": True,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": ((5, -1.0),),
}


def test_every_way_to_draw_is_known_to_follow_from_ids_and_position() -> None:
    assert {each.name for each in fields(Sampling)} == set(PARAMETERS)
    for name, value in PARAMETERS.items():
        assert value != getattr(Sampling(), name)


def test_every_part_of_a_submit_is_known_to_be_the_same_for_each_attempt() -> None:
    same = {"prompt_ids", "sampling", "choice", "adapter", "cache_salt", "priority", "fingerprint"}
    assert {each.name for each in fields(SubmitSpec)} == {*same, "output_ids", "timeout_s"}


async def test_a_resumed_output_is_drawn_and_read_as_was_asked_for(mesh: Mesh) -> None:
    request = ask(
        sampling=Sampling(**PARAMETERS),  # type: ignore[arg-type]
        stop=("#", "?"),
        include_stop=True,
        cache_salt="salt",
        priority=3,
        keep_special_tokens=True,
        choices=2,
    )
    kill = kill_serving_replica(mesh, {12, 22}, LinkLost)

    def script(step: int) -> None:
        kill(step)
        if step in {16, 24}:
            mesh.decoder.kill()

    mesh.script = script
    await collect(mesh, request)
    for choice in (0, 1):
        first, *later = [spec for spec in mesh.fleet.specs if spec.choice == choice]
        assert later
        for number, spec in enumerate(later):
            assert replace(spec, output_ids=b"", timeout_s=None) == replace(first, timeout_s=None)
            assert len(spec.output_ids) > 4 * number
            assert spec.timeout_s is not None
            assert first.timeout_s is not None
            assert spec.timeout_s <= first.timeout_s
    for name, value in PARAMETERS.items():
        assert getattr(mesh.fleet.specs[-1].sampling, name) == value
    opened = mesh.decoder.options
    assert len(opened) > 2
    assert set(opened) == {
        DecodeOptions(
            stop_strings=request.stop,
            include_stop=True,
            min_tokens=30,
            keep_special_tokens=True,
            render_tokens=True,
        )
    }
