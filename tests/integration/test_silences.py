"""Services that live and answer nothing, over real channels: nobody waits for them for ever."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from radixmesh.errors import DeadlineExceeded, InternalError, MeshError, QueueFull
from radixmesh.router.v1 import fleet_service_pb2, router_service_pb2
from tests.fakes.router_mesh import Got, RouterMesh, eventually, run_mesh
from tests.fakes.silent_text import silent_detokenizer, silent_tokenizer

PROMPT = "Once upon a time there was a small model that lived in a cache."
COUNT = 60
SLOW: dict[str, Any] = {"step_s": 0.01}
QUICK: dict[str, Any] = {"attempt_timeout_s": 0.4, "text_timeout_s": 0.5}


async def settled(condition: Callable[[], Awaitable[bool]]) -> None:
    """Return when the condition holds."""
    async with asyncio.timeout(5):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.02)


async def fit(mesh: RouterMesh) -> bool:
    """Whether nothing speaks against the first worker."""
    return not (await rows(mesh))["g0"].reason


async def rows(mesh: RouterMesh) -> dict[str, fleet_service_pb2.Replica]:
    listed = await mesh.fleet.ListReplicas(fleet_service_pb2.ListReplicasRequest())
    return {replica.group_id: replica for replica in listed.replicas}


def once(act: Callable[[], None], *, after: int) -> Callable[[Got], None]:
    done = False

    def watch(got: Got) -> None:
        nonlocal done
        if not done and len(got.ids.get(0, ())) >= after:
            done = True
            act()

    return watch


def stop_busy(mesh: RouterMesh) -> None:
    for worker in mesh.workers:
        worker.paused = bool(worker.running)


@pytest.mark.parametrize("way", ["paused", "deaf"])
async def test_a_worker_that_takes_requests_and_answers_none_is_left(
    model_dir: Path, way: str
) -> None:
    # One accepts and computes nothing, one does not even accept. Both repeat their load.
    async with run_mesh(model_dir, **QUICK) as mesh:
        setattr(mesh.workers[0], way, True)
        results = await asyncio.gather(*(mesh.generate(f"{n} {PROMPT}") for n in range(8)))
        for number, got in enumerate(results):
            assert got.text == mesh.text.output(f"{number} {PROMPT}", 16)
        left = [submit.entry_id for submit in mesh.workers[0].submits]
        assert left
        await eventually(lambda: set(left) == set(mesh.workers[0].cancelled))
        assert {got.finishes[0].receipt.last_group_id for got in results} == {"g1"}
        await mesh.until_nothing_is_held()


async def test_a_worker_that_stalls_in_mid_stream_is_left_at_the_next_position(
    model_dir: Path,
) -> None:
    async with run_mesh(model_dir, shape=SLOW, **QUICK) as mesh:
        watch = once(lambda: stop_busy(mesh), after=10)
        got = await mesh.generate(PROMPT, COUNT, watch=watch)
        assert got.text == mesh.text.output(PROMPT, COUNT)
        assert got.ids[0] == mesh.text.output_ids(PROMPT, COUNT)
        receipt = got.finishes[0].receipt
        assert receipt.attempts == 2
        assert receipt.group_id != receipt.last_group_id
        await mesh.until_nothing_is_held()


async def test_a_queue_that_moves_slowly_is_waited_in(model_dir: Path) -> None:
    # Its loads change while another request is computed, for much longer than silence is borne.
    async with run_mesh(model_dir, workers=1, **QUICK) as mesh:
        (worker,) = mesh.workers
        worker.paused = True
        waiting = asyncio.create_task(mesh.generate(PROMPT))
        await eventually(lambda: worker.running == 1)
        for free in range(12):
            worker.shape = replace(worker.shape, kv_blocks=4000 - free)
            worker.prove()
            await asyncio.sleep(0.1)
        worker.paused = False
        got = await waiting
        assert got.text == mesh.text.output(PROMPT, 16)
        assert len(worker.submits) == 1


async def test_a_worker_that_never_answers_is_found_out_and_spared(model_dir: Path) -> None:
    flags = {**QUICK, "breaker_failures": 2, "breaker_open_s": 1.0}
    async with run_mesh(model_dir, **flags) as mesh:
        mesh.workers[0].paused = True
        await asyncio.gather(*(mesh.generate(f"{n} {PROMPT}") for n in range(8)))
        row = (await rows(mesh))["g0"]
        assert row.phase == fleet_service_pb2.REPLICA_PHASE_READY
        assert "in a row" in row.reason
        sent = len(mesh.workers[0].submits)
        await asyncio.gather(*(mesh.generate(f"{n} {PROMPT}") for n in range(8)))
        assert len(mesh.workers[0].submits) == sent
        request = fleet_service_pb2.ExplainRouteRequest(
            request=router_service_pb2.GenerateRequest(text=PROMPT)
        )
        explained = await mesh.fleet.ExplainRoute(request)
        against = {one.group_id: one.reason for one in explained.candidates if not one.eligible}
        assert "in a row" in against["g0"]
        metrics = await mesh.metrics()
        assert metrics["radixmesh_router_replica_turns_total"] >= 1
        # It works again: one request finds that out, then all may.
        mesh.workers[0].paused = False
        async with asyncio.timeout(10):
            while not await fit(mesh):
                await mesh.generate(PROMPT, 2)
        await mesh.until_nothing_is_held()


async def test_errors_of_the_engine_open_a_breaker_and_full_queues_do_not(model_dir: Path) -> None:
    async with run_mesh(model_dir, breaker_failures=3) as mesh:
        broken, _ = mesh.workers
        broken.refuse = [QueueFull("full")] * 10
        for number in range(20):
            await mesh.generate(f"{number} {PROMPT}", 2)
        assert await fit(mesh)
        assert len(broken.refuse) < 10
        broken.refuse = [InternalError("bug")] * 100
        for number in range(20):
            got = await mesh.generate(f"{number} again {PROMPT}", 2)
            assert got.finishes[0].receipt.group_id == "g1"
        assert len(broken.refuse) == 97, "no client hears of it, and it is asked three times"
        assert "3 times in a row" in (await rows(mesh))["g0"].reason


async def test_a_new_life_of_a_replica_starts_with_a_closed_breaker(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=1, breaker_failures=1) as mesh:
        (worker,) = mesh.workers
        worker.refuse = [InternalError("bug")] * 2
        with pytest.raises(MeshError):
            await mesh.generate(PROMPT, 2)
        assert not await fit(mesh)
        worker.restart_replica(0)
        await settled(lambda: fit(mesh))
        await mesh.generate(PROMPT, 2)


async def test_the_only_worker_that_fails_is_still_asked(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=1, breaker_failures=1) as mesh:
        (worker,) = mesh.workers
        worker.refuse = [InternalError("bug")] * 6
        for _ in range(3):
            with pytest.raises(MeshError):
                await mesh.generate(PROMPT, 2)
        got = await mesh.generate(PROMPT, 2)
        assert got.text == mesh.text.output(PROMPT, 2)
        assert await fit(mesh)


async def test_a_tokenizer_that_never_answers_is_left_and_then_asked_last(model_dir: Path) -> None:
    async with silent_tokenizer(model_dir) as silent:
        extra = (f"127.0.0.1:{silent.port}",)
        async with run_mesh(model_dir, extra_tokenizers=extra, **QUICK) as mesh:
            await until_links(mesh, 5)
            while not silent.opened:
                got = await mesh.generate(PROMPT)
                assert got.text == mesh.text.output(PROMPT, 16)
            asked = len(silent.opened)
            results = await asyncio.gather(*(mesh.generate(PROMPT) for _ in range(20)))
            assert {got.text for got in results} == {mesh.text.output(PROMPT, 16)}
            assert len(silent.opened) == asked
            await eventually(lambda: silent.cancelled == silent.opened)


async def test_a_detokenizer_that_never_answers_is_left_and_then_asked_last(
    model_dir: Path,
) -> None:
    async with silent_detokenizer(model_dir) as silent:
        extra = (f"127.0.0.1:{silent.port}",)
        async with run_mesh(model_dir, extra_detokenizers=extra, **QUICK) as mesh:
            await until_links(mesh, 5)
            while not silent.opened:
                got = await mesh.generate(PROMPT, COUNT)
                assert got.text == mesh.text.output(PROMPT, COUNT)
            asked = len(silent.opened)
            results = await asyncio.gather(*(mesh.generate(PROMPT) for _ in range(20)))
            assert {got.text for got in results} == {mesh.text.output(PROMPT, 16)}
            assert len(silent.opened) == asked
            await eventually(lambda: silent.cancelled == silent.opened)
            await mesh.until_nothing_is_held()


async def until_links(mesh: RouterMesh, count: int) -> None:
    async def up() -> bool:
        return (await mesh.metrics())["radixmesh_router_links_up_count"] >= count

    await settled(up)


@pytest.mark.parametrize("where", ["worker", "tokenizer", "detokenizer"])
async def test_whoever_answers_nothing_no_client_waits_longer_than_it_said(
    model_dir: Path, where: str
) -> None:
    """With all bounds of silence out of reach only the client's own deadline is left."""
    patient: dict[str, Any] = {"attempt_timeout_s": 0, "text_timeout_s": 600.0}
    async with silent_tokenizer(model_dir) as tokens, silent_detokenizer(model_dir) as texts:
        kinds: dict[str, dict[str, Any]] = {
            "worker": {},
            "tokenizer": {"tokenizers": 0, "extra_tokenizers": (f"127.0.0.1:{tokens.port}",)},
            "detokenizer": {"detokenizers": 0, "extra_detokenizers": (f"127.0.0.1:{texts.port}",)},
        }
        async with run_mesh(model_dir, **patient, **kinds[where]) as mesh:
            await until_links(mesh, 4)
            for worker in mesh.workers:
                worker.deaf = where == "worker"
            began = asyncio.get_running_loop().time()
            with pytest.raises(DeadlineExceeded):
                await mesh.generate(PROMPT, timeout_s=0.5)
            assert asyncio.get_running_loop().time() - began < 2.0
            await mesh.until_nothing_is_held()
