"""Health is the answer to a probe and nothing else; with ranks that the test plays."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixmesh import errors
from tests.fakes.router_end import DOWN, DRAINING, UP, attach
from tests.fakes.scripted_ranks import READY, Row, ScriptedLauncher
from tests.fakes.worker_front import run_front
from worker.front.service import SERVICE_NAME
from worker.request import LENGTH, Answer, Broken, CacheChange

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PACE: dict[str, Any] = {"probe_interval_s": 0.05, "probe_timeout_s": 0.2}


async def health(address: str, service: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


async def test_a_replica_that_talks_but_leaves_its_probe_unanswered_is_not_ready(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    front = run_front(model_dir, launch=launcher, **PACE)
    async with front as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        running = router.submit([5])
        [add] = await ranks.adds(1)
        ranks.answers_probes = False
        probe = await ranks.probe()
        position = 0
        async with asyncio.timeout(5):
            while router.state(0) != DRAINING:
                ranks.step([Row(add.request_id, position, [9])], answers=[Answer(999)])
                position += 1
                await router.until(lambda at=position: len(running.ids) == at)  # type: ignore[misc]
        assert await health(address, SERVICE_NAME) == NOT_SERVING
        assert await health(address, "") == SERVING, "the process lives"
        refused = await router.submit([6], dp_rank=0).failure()
        assert isinstance(refused, errors.Draining)
        nobody = await router.submit([6]).failure()
        assert isinstance(nobody, errors.NoReplicaReady)
        ranks.step([Row(add.request_id, position, [8], LENGTH)])
        assert (await running.result())[-1] == 8, "what it has goes on"
        ranks.answers_probes = True
        ranks.step(answers=[Answer(probe.token)])
        await router.until(lambda: router.state(0) == UP)
        assert await health(address, SERVICE_NAME) == SERVING


async def test_a_group_whose_ranks_disagree_is_not_ready_until_they_are_started_anew(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        assert await health(address, SERVICE_NAME) == SERVING
        launcher.ready = None  # the next ones take their time
        ranks = await launcher.incarnation(0, 0)
        ranks.send(Broken("RANK_DESYNC", "ranks [1] planned another step 7"))
        await router.until(lambda: router.state(0) == DOWN)
        assert await health(address, SERVICE_NAME) == NOT_SERVING
        assert await health(address, "") == SERVING
        (await launcher.incarnation(0, 1)).send(READY)
        await router.until_up(0)
        assert await health(address, SERVICE_NAME) == SERVING


async def test_a_replica_that_answers_again_has_lost_nothing(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    front = run_front(model_dir, launch=launcher, **PACE)
    async with front as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        ranks.step(changes=[CacheChange(0, [10, 11])])
        ranks.answers_probes = False
        probe = await ranks.probe()
        await router.until(lambda: router.state(0) == DRAINING)
        ranks.step(changes=[CacheChange(11, [12])], answers=[Answer(probe.token)])
        await router.until(lambda: router.state(0) == UP and len(router.feeds[0].keys) == 3)
        assert router.feeds[0].snapshots == 1
        assert router.history[-2:] == [(0, DRAINING), (0, UP)]


async def test_one_question_is_open_at_a_time_however_long_it_takes(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    front = run_front(model_dir, launch=launcher, **PACE)
    async with front as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        ranks.answers_probes = False
        await ranks.probe()
        await router.until(lambda: router.state(0) == DRAINING)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await ranks.probe()


async def test_an_idle_replica_that_never_answers_is_given_up_with_its_stacks_in_the_log(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    front = run_front(model_dir, launch=launcher, dp=2, step_timeout_s=0.1, **PACE)
    async with front as address, attach(address) as router:
        await router.until_up(0, 1)
        stuck = await launcher.incarnation(0, 0)
        other = await launcher.incarnation(1, 0)
        stuck.answers_probes = False
        await stuck.ended.wait()
        assert stuck.dumps == 1
        await launcher.incarnation(0, 1)
        await router.until(lambda: router.state(0) == UP)
        assert not other.ended.is_set()
        assert (1, DRAINING) not in router.history
        assert (0, DRAINING) in router.history, "it got no new work long before it was given up"


async def test_a_group_is_ready_while_one_of_its_replicas_answers(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    front = run_front(model_dir, launch=launcher, dp=2, **PACE)
    async with front as address, attach(address) as router:
        await router.until_up(0, 1)
        silent, well = [await launcher.incarnation(each, 0) for each in (0, 1)]
        silent.answers_probes = False
        await router.until(lambda: router.state(0) == DRAINING)
        assert await health(address, SERVICE_NAME) == SERVING
        output = router.submit([5])
        [add] = await well.adds(1)
        well.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await output.result() == [9]
