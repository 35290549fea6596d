"""The way of a request whose services live and answer nothing: they are left, in time."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from radixmesh.blocks import pack_ids
from radixmesh.errors import DeadlineExceeded, GroupLost, LinkLost, ServiceUnavailable
from router.fleet.breaker import Outcome
from router.pipeline import Pace
from tests.fakes.pipeline_mesh import PROMPT, Mesh, ask, collect, failure, kill_serving_replica
from tests.fakes.small_mesh import SmallFleet, expected_text


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


IMPATIENT = Pace(
    request_timeout_s=10.0,
    ready_wait_s=1.0,
    text_wait_s=0.05,
    resume_wait_s=1.0,
    stream_interval_s=0.0,
    attempt_timeout_s=0.1,
    text_timeout_s=0.1,
)


def stall(mesh: Mesh, *, after: int) -> Callable[[int], None]:
    """The replica that has the stream stops at a step, and stays so."""

    def script(step: int) -> None:
        if step == after:
            for replica in mesh.fleet.replicas:
                replica.stalled = bool(replica.entries)

    mesh.fleet.predicted_wait_s = 0.01
    return script


@pytest.mark.parametrize(
    ("after", "resumes", "attempts"),
    [pytest.param(2, False, 1, id="never accepts"), pytest.param(9, True, 2, id="starts")],
)
async def test_a_replica_that_stalls_is_left(
    mesh: Mesh, after: int, resumes: bool, attempts: int
) -> None:
    mesh.script = stall(mesh, after=after)
    if not resumes:
        for replica in mesh.fleet.replicas[:1]:
            replica.stalled = True
        mesh.script = lambda step: None
    got = await collect(mesh, ask(40), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert [one.resume for one in mesh.fleet.asks] == [False, resumes]
    stalled, healthy = mesh.fleet.replicas
    assert mesh.fleet.asks[1].avoid == {(stalled.group_id, 0, 1)}
    assert mesh.losses == [("worker", "ATTEMPT_TIMEOUT")]
    assert mesh.fleet.outcomes[0] == (stalled.group_id, Outcome.FAILED)
    assert mesh.fleet.cancelled == 1, "the first attempt is fenced"
    receipt = got.finishes[0].receipt
    assert (receipt.attempts, receipt.last_group_id) == (attempts, healthy.group_id)
    mesh.assert_nothing_is_held()


async def test_what_a_fenced_replica_still_says_is_not_heard(mesh: Mesh) -> None:
    stalls = stall(mesh, after=9)

    def script(step: int) -> None:
        stalls(step)
        if step == 9:
            for replica in mesh.fleet.replicas:
                replica.up = False  # so that there is nobody to go to for a while
        if mesh.losses and len(mesh.fleet.sinks) == 1:
            mesh.fleet.revive(mesh.fleet.replicas[1])
        if mesh.losses:
            # It wakes up with ids at every position that may be the next one, and dies again.
            for position in range(40):
                mesh.fleet.sinks[0].on_tokens(position, pack_ids([120]), [], 0)
            mesh.fleet.sinks[0].on_failed(GroupLost("late"))

    mesh.script = script
    got = await collect(mesh, ask(40), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert len(mesh.fleet.specs) == 2


async def test_a_long_queue_or_prefill_is_no_silence_while_the_replica_works(mesh: Mesh) -> None:
    mesh.fleet.predicted_wait_s = 0.01
    began = asyncio.get_running_loop().time()

    def script(step: int) -> None:
        # It makes steps for others for four times as long as silence is borne.
        waits = asyncio.get_running_loop().time() - began < 0.4
        for replica in mesh.fleet.replicas:
            replica.stalled = waits
            replica.stepped_at = asyncio.get_running_loop().time()

    mesh.script = script
    got = await collect(mesh, ask(), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 12)}
    assert not mesh.losses
    assert len(mesh.fleet.specs) == 1


async def test_a_prefill_that_was_predicted_to_take_long_may(mesh: Mesh) -> None:
    mesh.fleet.predicted_wait_s = 0.15
    began = asyncio.get_running_loop().time()

    def script(step: int) -> None:
        waits = asyncio.get_running_loop().time() - began < 0.3
        for replica in mesh.fleet.replicas:
            replica.stalled = waits

    mesh.script = script
    await collect(mesh, ask(), IMPATIENT)
    assert not mesh.losses


async def test_silence_is_borne_for_ever_where_that_is_asked_for(mesh: Mesh) -> None:
    for replica in mesh.fleet.replicas:
        replica.stalled = True
    pace = replace(IMPATIENT, attempt_timeout_s=0)
    assert isinstance(await failure(mesh, ask(timeout_s=0.4), pace), DeadlineExceeded)
    assert len(mesh.fleet.specs) == 1
    mesh.assert_nothing_is_held()


async def test_a_fleet_that_stalls_altogether_ends_in_a_typed_error_in_time(mesh: Mesh) -> None:
    mesh.fleet.predicted_wait_s = 0.01
    for replica in mesh.fleet.replicas:
        replica.stalled = True
    refusal = await failure(mesh, ask(), IMPATIENT)
    assert isinstance(refusal, GroupLost)
    assert refusal.retry_after_s
    assert len(mesh.fleet.specs) == 6
    mesh.assert_nothing_is_held()


async def test_the_only_replica_is_tried_again_after_a_silence(mesh: Mesh) -> None:
    del mesh.fleet.replicas[1]
    mesh.fleet.predicted_wait_s = 0.01

    def script(step: int) -> None:
        mesh.fleet.replicas[0].stalled = step >= 9 and len(mesh.fleet.specs) < 3

    mesh.script = script
    got = await collect(mesh, ask(40), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert len(mesh.fleet.specs) == 3


@pytest.mark.parametrize("after", [0, 12, 46])
async def test_a_detokenizer_that_stalls_is_left(mesh: Mesh, after: int) -> None:
    # Before the first text, after some, and after the last id.
    def script(step: int) -> None:
        mesh.decoder.paused = step >= after and not mesh.decoder.blamed

    mesh.script = script
    got = await collect(mesh, ask(200), IMPATIENT)
    assert got.texts == {0: expected_text(PROMPT, 200)}
    assert got.ids[0] == list(got.texts[0].encode())
    assert (mesh.decoder.opened, mesh.decoder.blamed) == (2, 1)
    assert mesh.losses == [("detokenizer", "SERVICE_UNAVAILABLE")]
    mesh.assert_nothing_is_held()


async def test_a_detokenizer_that_stalls_is_left_while_the_output_goes_on(mesh: Mesh) -> None:
    def script(step: int) -> None:
        mesh.decoder.paused = step >= 12 and not mesh.decoder.blamed
        for replica in mesh.fleet.replicas:
            # The last id comes long after: it is not what calls attention to the silence.
            replica.stalled = step >= 120 and not mesh.decoder.blamed

    mesh.script = script
    pace = replace(IMPATIENT, attempt_timeout_s=0)
    got = await collect(mesh, ask(200, timeout_s=2.0), pace)
    assert got.texts == {0: expected_text(PROMPT, 200)}
    assert mesh.losses == [("detokenizer", "SERVICE_UNAVAILABLE")]


async def test_detokenizers_that_all_stall_end_it_in_a_typed_error(mesh: Mesh) -> None:
    mesh.decoder.paused = True
    assert isinstance(await failure(mesh, ask(200), IMPATIENT), ServiceUnavailable)
    assert mesh.decoder.opened == 4
    mesh.assert_nothing_is_held()


async def test_a_detokenizer_that_owes_nothing_may_be_silent(mesh: Mesh) -> None:
    # The worker rests in mid-stream, longer than a detokenizer may be silent.
    rested = 0.0

    def script(step: int) -> None:
        nonlocal rested
        now = asyncio.get_running_loop().time()
        rested = rested or (now if step == 20 else 0.0)
        for replica in mesh.fleet.replicas:
            replica.stalled = 0 < now - rested < 0.3 and bool(rested)

    mesh.script = script
    await collect(mesh, ask(40), replace(IMPATIENT, attempt_timeout_s=0))
    assert not mesh.losses


async def test_text_that_a_stop_string_holds_back_is_no_silence(mesh: Mesh) -> None:
    whole = expected_text(PROMPT, 300)
    stop = whole[10:260] + "#"
    rested: list[float] = []

    def script(step: int) -> None:
        # In the middle of 250 characters that are held back the worker rests.
        now = asyncio.get_running_loop().time()
        if step == 150:
            rested.append(now)
        for replica in mesh.fleet.replicas:
            replica.stalled = bool(rested) and now - rested[0] < 0.3

    mesh.script = script
    got = await collect(mesh, ask(300, stop=(stop,)), replace(IMPATIENT, attempt_timeout_s=0))
    assert got.texts == {0: whole}
    assert not mesh.losses


@pytest.mark.parametrize("seed", range(8))
async def test_random_stalls_and_deaths_change_nothing_for_the_client(seed: int) -> None:
    mesh = Mesh(fleet=SmallFleet(3))
    mesh.fleet.predicted_wait_s = 0.01
    chance = random.Random(seed)
    pace = replace(IMPATIENT, attempt_timeout_s=0.05, text_timeout_s=0.05)
    due = {chance.randrange(60): chance.randrange(3) for _ in range(4)}
    ids, blamed = -1, 0

    def script(step: int) -> None:
        nonlocal ids, blamed
        if mesh.decoder.blamed > blamed:
            blamed, mesh.decoder.paused = mesh.decoder.blamed, False
        had = max((len(entry.ids) for entry in mesh.decoder.entries), default=0)
        if had <= ids:
            return
        # One fault at a time, at ids that are drawn; what stalled before works again.
        ids = had
        fault = due.get(ids)
        if fault is None:
            return
        for replica in mesh.fleet.replicas:
            replica.stalled = fault == 0 and bool(replica.entries)
        mesh.decoder.paused = fault == 1
        if fault == 2:
            kill_serving_replica(mesh, {step}, LinkLost)(step)

    mesh.script = script
    got = await collect(mesh, ask(150, choices=2), pace)
    for choice in (0, 1):
        assert got.texts[choice] == expected_text(PROMPT, 150)
    assert mesh.losses
    mesh.assert_nothing_is_held()
