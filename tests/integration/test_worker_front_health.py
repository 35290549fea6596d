"""Ranks that stand still, are busy for long, or come and go; real processes, the fake engine."""

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixmesh import errors
from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.rank_processes import gone, ranks_of
from tests.fakes.router_end import DRAINING, UP, attach
from tests.fakes.worker_front import run_front
from worker.front.service import SERVICE_NAME

pytestmark = [pytest.mark.e2e]

# In a test a probe comes 20 times a second; a stuck replica is given up after 2.5 s.
QUICK: dict[str, Any] = {"probe_interval_s": 0.05, "probe_timeout_s": 1.0, "step_timeout_s": 0.5}


@pytest.fixture
def ordinary(model_dir: Path) -> list[int]:
    return ordinary_ids(model_dir)


def prompts(count: int, *, tokens: int = 40) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(4, 1000) for _ in range(tokens)] for _ in range(count)]


async def test_an_idle_leader_that_stands_still_is_found_and_replaced(
    model_dir: Path, ordinary: list[int]
) -> None:
    async with run_front(model_dir, **QUICK) as address, attach(address) as router:
        await router.until_up(0)
        [rank] = ranks_of(os.getpid())
        rank.send_signal(signal.SIGSTOP)
        await router.until(lambda: router.state(0) == DRAINING)
        await gone([rank])
        await router.until_up(0)
        [prompt] = prompts(1)
        again = router.submit(prompt, max_tokens=20)
        assert await again.result() == oracle_output(prompt, ordinary, 20)


async def test_an_idle_follower_that_stands_still_is_found_by_its_leader(model_dir: Path) -> None:
    flags: dict[str, Any] = {"tp": 2, "probe_interval_s": 0.1, "peer_timeout_s": 0.5}
    async with run_front(model_dir, **flags) as address, attach(address) as router:
        await router.until_up(0)
        ranks = ranks_of(os.getpid())
        [follower] = ranks_of(os.getpid(), "tp=1")
        follower.send_signal(signal.SIGSTOP)
        # Long before any probe is overdue.
        async with asyncio.timeout(10):
            await gone(ranks)
            await router.until_up(0)


async def test_ranks_that_wait_for_a_stuck_one_leave_their_stacks_in_the_log(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"tp": 2, "peer_timeout_s": 30, **QUICK}
    async with run_front(model_dir, **flags) as address, attach(address) as router:
        await router.until_up(0)
        ranks = ranks_of(os.getpid())
        [leader] = ranks_of(os.getpid(), "tp=0")
        leader.send_signal(signal.SIGSTOP)
        await gone(ranks)
        await router.until_up(0)
    log = capfd.readouterr().err
    assert "rank is given up" in log
    assert "<Turns step=" in log, "how far it had come"
    assert "in receive" in log, "where it waits"


@pytest.mark.parametrize("victim", ["tp=0", "tp=1"])
@pytest.mark.parametrize("busy", [False, True])
async def test_a_killed_rank_makes_no_healthy_one_leave_stacks(
    model_dir: Path, capfd: pytest.CaptureFixture[str], victim: str, *, busy: bool
) -> None:
    flags: dict[str, Any] = {"tp": 2, "fake_decode_ms": 5, "probe_interval_s": 0.2}
    async with run_front(model_dir, **flags) as address, attach(address) as router:
        await router.until_up(0)
        ranks = ranks_of(os.getpid())
        if busy:
            await router.submit([5, 6], max_tokens=400).begun.wait()
        [rank] = ranks_of(os.getpid(), victim)
        rank.kill()
        await gone(ranks)
        await router.until_up(0)
    log = capfd.readouterr().err
    assert "rank is given up" not in log
    assert "Traceback" not in log
    assert "front gone" not in log


async def test_a_rank_that_another_waits_for_in_vain_leaves_its_stack_in_the_log(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags: dict[str, Any] = {"tp": 2, "fake_faults": ["hang@prompt-contains=77:tp=1"]}
    async with run_front(model_dir, **flags) as address, attach(address) as router:
        await router.until_up(0)
        output = router.submit([77, 5, 6], max_tokens=200)
        async with asyncio.timeout(5):
            assert isinstance(await output.failure(), errors.GroupLost)
        await router.until_up(0)
    log = capfd.readouterr().err
    assert "in _break_down" in log, "where it is stuck"
    assert "planned last" in log, "what the other one had planned"


@pytest.mark.parametrize(
    "shape", [{}, pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.long)], ids=str
)
async def test_a_prefill_far_longer_than_all_limits_is_alive_and_ready(
    model_dir: Path, ordinary: list[int], shape: dict[str, Any]
) -> None:
    # 10 steps of 0.4 s; a step may take 2.5 s, an answer 1 s.
    pace: dict[str, Any] = {"fake_prefill_tokens_per_s": 80, "max_batched_tokens": 32}
    async with run_front(model_dir, **QUICK, **pace, **shape) as address, attach(address) as router:
        await router.until_up(0)
        router.history.clear()
        [prompt] = prompts(1, tokens=320)
        output = router.submit(prompt, max_tokens=4)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not output.begun.is_set():
                for service in ("", SERVICE_NAME):
                    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
                    assert answer.status == health_pb2.HealthCheckResponse.SERVING
                await asyncio.wait([asyncio.ensure_future(output.begun.wait())], timeout=0.1)
        assert await output.result() == oracle_output(prompt, ordinary, 4)
        assert router.history == []


async def test_scaling_while_streams_run_loses_nothing(
    model_dir: Path, ordinary: list[int]
) -> None:
    flags: dict[str, Any] = {"fake_decode_ms": 5, "drain_grace_s": 10}
    async with (
        run_front(model_dir, **flags) as address,
        attach(address) as router,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = WorkerServiceStub(channel)
        await router.until_up(0)
        asked = prompts(48)
        outputs = [router.submit(prompt, max_tokens=100) for prompt in asked[:16]]
        assert (await stub.ScaleReplicas(pb.ScaleReplicasRequest(dp=3))).dp == 3
        await router.until_up(0, 1, 2)
        assert len(ranks_of(os.getpid())) == 3
        outputs += [
            router.submit(prompt, max_tokens=100, dp_rank=at % 3)
            for at, prompt in enumerate(asked[16:])
        ]
        for output in outputs[16:]:
            await output.begun.wait()
        assert (await stub.ScaleReplicas(pb.ScaleReplicasRequest(dp=1))).dp == 3
        for prompt, output in zip(asked, outputs, strict=True):
            assert await output.result() == oracle_output(prompt, ordinary, 100)
        await router.until(lambda: router.info is not None and router.info.topology.dp == 1)
        assert router.state(0) == UP
        assert len(ranks_of(os.getpid())) == 1


async def test_a_kept_up_question_costs_an_idle_replica_next_to_nothing(model_dir: Path) -> None:
    # A hundred times as often as by default, so that it can be told from noise at all.
    async with run_front(model_dir, probe_interval_s=0.05) as address, attach(address) as router:
        await router.until_up(0)
        [rank] = ranks_of(os.getpid())

        def used(process: psutil.Process) -> float:
            return sum(process.cpu_times()[:2])

        proofs = router.feeds[0].proofs
        before = used(rank)
        await router.until(lambda: router.feeds[0].proofs == proofs + 3)
        seconds = used(rank) - before
        assert seconds < 3 * 0.1, "0.1 % of a core at the default pace"
