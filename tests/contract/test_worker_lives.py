"""How replicas live and die: start, self-test, loss, restart; with ranks that the test plays."""

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import msgspec
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixmesh import errors
from radixmesh.rpc.status import from_rpc_error
from radixmesh.worker.v1.worker_service_pb2 import AttachRequest
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.router_end import DOWN, DRAINING, UP, attach
from tests.fakes.scripted_ranks import READY, Row, ScriptedLauncher
from tests.fakes.worker_front import run_front
from worker.front.service import SERVICE_NAME
from worker.request import LENGTH, Broken, CacheChange

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        return int(answer.status)


async def watch_health(address: str, wanted: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        try:
            while (await call.read()).status != wanted:
                pass
        finally:
            call.cancel()


async def test_a_replica_is_not_up_before_a_request_has_gone_through_it(model_dir: Path) -> None:
    launcher = ScriptedLauncher(passes_test=False)
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until(lambda: router.info is not None)
        ranks = await launcher.incarnation(0, 0)
        assert router.state(0) == DOWN
        assert await health(address) == NOT_SERVING
        refused = router.submit([5], dp_rank=0)
        assert isinstance(await refused.failure(), errors.GroupLost)
        ranks.step([Row(ranks.last_request_id, 0, [7, 8], LENGTH)])
        await router.until_up(0)
        await watch_health(address, SERVING)


async def test_a_router_that_comes_before_any_rank_is_ready_waits_for_one(model_dir: Path) -> None:
    launcher = ScriptedLauncher(ready=None)
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        ranks = await launcher.incarnation(0, 0)
        assert not router.link.connected
        ranks.send(READY)
        await router.until_up(0)


async def test_a_router_that_waits_for_a_rank_is_refused_when_the_front_ends(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = asyncio.Event()
    front = run_front(model_dir, launch=ScriptedLauncher(ready=None), stop=stop)
    async with front as address, grpc.aio.insecure_channel(address) as channel:
        call = WorkerServiceStub(channel).Attach()
        await call.write(AttachRequest())
        # Calls of one connection begin in their order: that one waits when this is answered.
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert isinstance(from_rpc_error(refused.value), errors.Draining)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


async def test_ranks_that_are_not_ready_in_time_are_started_anew(model_dir: Path) -> None:
    launcher = ScriptedLauncher(ready=None)
    async with run_front(model_dir, launch=launcher, startup_timeout_s=0.05):
        first = await launcher.incarnation(0, 0)
        await first.ended.wait()
        second = await launcher.incarnation(0, 1)
        assert second.incarnation != first.incarnation


async def test_ranks_that_fail_the_self_test_are_started_anew(model_dir: Path) -> None:
    launcher = ScriptedLauncher(passes_test=False)
    async with run_front(model_dir, launch=launcher, startup_timeout_s=0.05):
        await (await launcher.incarnation(0, 0)).ended.wait()
        await launcher.incarnation(0, 1)


async def test_a_dead_rank_fails_its_own_replica_s_requests_and_no_others(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher, dp=2) as address, attach(address) as router:
        await router.until_up(0, 1)
        ranks = [await launcher.incarnation(each, 0) for each in (0, 1)]
        lost = [router.submit([5], dp_rank=0) for _ in range(8)]
        kept = router.submit([6], dp_rank=1)
        await ranks[0].adds(8)
        [add] = await ranks[1].adds(1)
        ranks[0].die("rank dp=0 pp=0 tp=0 was killed by SIGKILL")
        async with asyncio.timeout(2):
            failures = [await each.failure() for each in lost]
        assert {type(each) for each in failures} == {errors.GroupLost}
        assert failures[0].message == "rank dp=0 pp=0 tp=0 was killed by SIGKILL"
        assert router.state(0) == DOWN, "the status comes before the failures"
        ranks[1].step([Row(add.request_id, 0, [9], LENGTH)])
        assert await kept.result() == [9]
        assert await health(address) == SERVING


async def test_a_restarted_replica_has_a_new_incarnation_and_an_empty_cache(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        first = await launcher.incarnation(0, 0)
        first.step(changes=[CacheChange(0, [10, 11])])
        await router.until(lambda: len(router.feeds[0].keys) == 2)
        first.die()
        second = await launcher.incarnation(0, 1)
        await router.until(lambda: router.state(0) == UP and not router.feeds[0].keys)
        assert router.statuses[0].incarnation == second.incarnation != first.incarnation
        assert router.feeds[0].incarnation == second.incarnation
        assert router.history[-3:] == [(0, UP), (0, DOWN), (0, UP)]
        output = router.submit([5])
        [add] = await second.adds(1)
        second.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await output.result() == [9]


async def test_tokens_that_a_rank_sent_before_it_died_are_delivered(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        output = router.submit([5])
        [add] = await ranks.adds(1)
        for position in range(100):
            ranks.step([Row(add.request_id, position, [position])])
        ranks.die()
        assert isinstance(await output.failure(), errors.GroupLost)
        assert output.ids == list(range(100))


async def test_ranks_that_disagree_fail_their_requests_by_that_name(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        output = router.submit([5])
        await ranks.adds(1)
        ranks.send(Broken("RANK_DESYNC", "ranks [1] planned another step 7"))
        failure = await output.failure()
        assert isinstance(failure, errors.RankDesync)
        assert failure.message == "ranks [1] planned another step 7"
        await launcher.incarnation(0, 1)


async def test_whatever_else_breaks_a_rank_is_a_loss_that_a_router_can_resume_after(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        output = router.submit([5])
        await ranks.adds(1)
        ranks.send(Broken("INTERNAL", "rank dp=0 pp=0 tp=0: RuntimeError"))
        assert (await output.failure()).reason in errors.RESUMABLE


async def test_a_replica_with_work_and_nothing_to_say_is_started_anew(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    # With the slack that the rank's own watchdog gets: 2.5 s.
    pace: dict[str, Any] = {"step_timeout_s": 0.5, "probe_interval_s": 0.1}
    async with (
        run_front(model_dir, launch=launcher, **pace) as address,
        attach(address) as router,
    ):
        await router.until_up(0)
        stuck = await launcher.incarnation(0, 0)
        stuck.answers_probes = False
        output = router.submit([5])
        failure = await output.failure()
        assert isinstance(failure, errors.GroupLost)
        assert "stuck" in failure.message
        await stuck.ended.wait()
        assert stuck.dumps == 1


async def test_an_idle_replica_is_not_stuck_however_long_it_has_no_work(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    pace: dict[str, Any] = {"step_timeout_s": 0.01, "probe_interval_s": 0.1}
    async with (
        run_front(model_dir, launch=launcher, **pace) as address,
        attach(address) as router,
    ):
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        await router.until(lambda: router.feeds[0].proofs == 4)
        assert not ranks.ended.is_set()


async def test_nonsense_in_the_mailbox_restarts_the_replica_and_nothing_else(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher, dp=2) as address, attach(address) as router:
        await router.until_up(0, 1)
        ranks = await launcher.incarnation(0, 0)
        other = await launcher.incarnation(1, 0)
        ranks.send_raw(b"\x03\x00\x00\x00\xff\xff\xff")
        await ranks.ended.wait()
        await launcher.incarnation(0, 1)
        assert not other.ended.is_set()


async def test_limits_that_differ_from_those_announced_are_not_accepted(model_dir: Path) -> None:
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        launcher.ready = msgspec.structs.replace(READY, block_tokens=32)
        (await launcher.incarnation(0, 0)).die()
        await (await launcher.incarnation(0, 1)).ended.wait()
        assert router.state(0) == DOWN


async def test_a_stopping_group_announces_itself_and_lets_running_requests_finish(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    stop = asyncio.Event()
    front = run_front(model_dir, launch=launcher, stop=stop, drain_grace_s=10)
    async with front as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        running = router.submit([5])
        [add] = await ranks.adds(1)
        stop.set()
        await router.until(lambda: router.state(0) == DRAINING)
        assert await health(address) == NOT_SERVING
        refused = router.submit([6])
        assert isinstance(await refused.failure(), errors.Draining)
        ranks.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await running.result() == [9]
        await ranks.ended.wait()


async def test_requests_that_outlast_the_grace_are_given_up_for_others_to_resume(
    model_dir: Path,
) -> None:
    launcher = ScriptedLauncher()
    stop = asyncio.Event()
    front = run_front(model_dir, launch=launcher, stop=stop, drain_grace_s=0.05)
    async with front as address, attach(address) as router:
        await router.until_up(0)
        running = router.submit([5])
        await (await launcher.incarnation(0, 0)).adds(1)
        stop.set()
        assert isinstance(await running.failure(), errors.Draining)
