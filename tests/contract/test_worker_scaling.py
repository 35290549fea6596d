"""Replicas that are added and retired while a group serves, with ranks that the test plays."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc.aio
import pytest

from radixmesh import errors
from radixmesh.rpc.status import from_rpc_error
from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.router_end import DOWN, DRAINING, UP, RouterEnd, attach
from tests.fakes.scripted_ranks import Row, ScriptedLauncher
from tests.fakes.worker_front import free_port, run_front
from worker.request import LENGTH, CacheChange


@dataclass
class Scene:
    """A group, a router that follows it, and a caller that scales it."""

    address: str
    router: RouterEnd
    launcher: ScriptedLauncher
    stub: Any

    async def scale(self, dp: int) -> int:
        answer = await self.stub.ScaleReplicas(pb.ScaleReplicasRequest(dp=dp))
        return int(answer.dp)

    @property
    def dp(self) -> int:
        """As the router was told."""
        info = self.router.info
        return info.topology.dp if info else 0

    async def until_dp(self, dp: int) -> None:
        await self.router.until(lambda: self.dp == dp)


@asynccontextmanager
async def scene(model_dir: Path, *, dp: int = 1, **flags: Any) -> AsyncGenerator[Scene, None]:
    launcher = ScriptedLauncher()
    async with AsyncExitStack() as stack:
        front = run_front(model_dir, launch=launcher, dp=dp, **{"drain_grace_s": 10, **flags})
        address = await stack.enter_async_context(front)
        router = await stack.enter_async_context(attach(address))
        await router.until_up(*range(dp))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        yield Scene(address, router, launcher, WorkerServiceStub(channel))


async def test_added_replicas_are_announced_followed_and_used(model_dir: Path) -> None:
    async with scene(model_dir) as group:
        assert await group.scale(3) == 3
        await group.until_dp(3)
        await group.router.until_up(0, 1, 2)
        added = await group.launcher.incarnation(2, 0)
        added.step(changes=[CacheChange(0, [10, 11])])
        await group.router.until(lambda: group.router.feeds[2].keys == {10: 0, 11: 10})
        output = group.router.submit([5], dp_rank=2)
        [add] = await added.adds(1)
        added.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await output.result() == [9]
        first = await group.launcher.incarnation(0, 0)
        assert not first.ended.is_set()


async def test_a_router_that_comes_later_is_told_of_the_replicas_that_there_are(
    model_dir: Path,
) -> None:
    async with scene(model_dir) as group:
        await group.scale(2)
        await group.router.until_up(1)
        async with attach(group.address, "late") as late:
            await late.until_up(0, 1)
            assert late.info is not None
            assert late.info.topology.dp == 2


async def test_a_retiring_replica_finishes_what_it_has_and_takes_nothing_new(
    model_dir: Path,
) -> None:
    async with scene(model_dir, dp=2) as group:
        router = group.router
        ranks = await group.launcher.incarnation(1, 0)
        running = router.submit([5], dp_rank=1)
        [add] = await ranks.adds(1)
        assert await group.scale(1) == 2
        await router.until(lambda: router.state(1) == DRAINING)
        refused = await router.submit([6], dp_rank=1).failure()
        assert isinstance(refused, errors.Draining)
        assert not ranks.ended.is_set()
        ranks.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await running.result() == [9]
        await group.until_dp(1)
        assert router.history[-2:] == [(1, DRAINING), (1, DOWN)]
        assert ranks.ended.is_set()


async def test_who_has_not_heard_of_a_retirement_is_sent_elsewhere(model_dir: Path) -> None:
    async with scene(model_dir, dp=2) as group:
        await group.scale(1)
        await group.until_dp(1)
        late = await group.router.submit([6], dp_rank=1).failure()
        assert late.reason in errors.RESUMABLE
        never = await group.router.submit([6], dp_rank=2).failure()
        assert isinstance(never, errors.GroupNotFound)


async def test_requests_that_outlast_the_grace_are_given_up_for_others_to_resume(
    model_dir: Path,
) -> None:
    async with scene(model_dir, dp=2, drain_grace_s=0.05) as group:
        running = group.router.submit([5], dp_rank=1)
        await (await group.launcher.incarnation(1, 0)).adds(1)
        await group.scale(1)
        # Not as of a replica that died: two of those make a request suspect.
        assert isinstance(await running.failure(), errors.Draining)
        await group.until_dp(1)


async def test_a_draining_replica_that_is_wanted_again_goes_on_as_it_was(model_dir: Path) -> None:
    async with scene(model_dir, dp=2, drain_grace_s=0.3) as group:
        router = group.router
        ranks = await group.launcher.incarnation(1, 0)
        ranks.step(changes=[CacheChange(0, [10])])
        running = router.submit([5], dp_rank=1)
        [add] = await ranks.adds(1)
        await group.scale(1)
        await router.until(lambda: router.state(1) == DRAINING)
        assert await group.scale(2) == 2
        await router.until(lambda: router.state(1) == UP)
        # Longer than the grace that was under way: proofs come a second apart.
        proofs = router.feeds[1].proofs
        await router.until(lambda: router.feeds[1].proofs >= proofs + 2)
        ranks.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await running.result() == [9]
        assert router.feeds[1].snapshots == 1
        assert router.feeds[1].keys == {10: 0}
        assert len(group.launcher.ranks[1]) == 1


async def test_a_replica_that_is_wanted_again_while_it_ends_starts_anew_after_that(
    model_dir: Path,
) -> None:
    async with scene(model_dir, dp=2) as group:
        ranks = await group.launcher.incarnation(1, 0)
        ranks.may_end.clear()
        await group.scale(1)
        await group.router.until(lambda: group.router.state(1) == DOWN)
        assert await group.scale(2) == 2
        ranks.may_end.set()
        again = await group.launcher.incarnation(1, 1)
        await group.router.until(lambda: group.router.state(1) == UP)
        assert ranks.ended.is_set()
        assert group.router.statuses[1].incarnation == again.incarnation
        assert group.dp == 2


async def test_replicas_leave_from_the_highest_down_whichever_ends_first(model_dir: Path) -> None:
    async with scene(model_dir, dp=3) as group:
        router = group.router
        busy = await group.launcher.incarnation(2, 0)
        running = router.submit([5], dp_rank=2)
        [add] = await busy.adds(1)
        await group.scale(1)
        await router.until(lambda: router.state(1) == DOWN)
        assert group.dp == 3
        answer = await group.stub.GetGroup(pb.GetGroupRequest())
        assert [status.dp_rank for status in answer.statuses] == [0, 1, 2]
        busy.step([Row(add.request_id, 0, [9], LENGTH)])
        assert await running.result() == [9]
        await group.until_dp(1)
        answer = await group.stub.GetGroup(pb.GetGroupRequest())
        assert [status.dp_rank for status in answer.statuses] == [0]
        assert answer.info.topology.dp == 1


async def test_a_replica_that_never_became_ready_can_retire(model_dir: Path) -> None:
    async with scene(model_dir) as group:
        group.launcher.ready = None
        await group.scale(2)
        starting = await group.launcher.incarnation(1, 0)
        await group.scale(1)
        await starting.ended.wait()
        await group.until_dp(1)


async def test_a_retired_number_is_used_again_by_a_new_replica(model_dir: Path) -> None:
    async with scene(model_dir, dp=2) as group:
        first = group.router.statuses[1].incarnation
        await group.scale(1)
        await group.until_dp(1)
        await group.scale(2)
        await group.router.until(lambda: group.router.state(1) == UP)
        assert group.router.statuses[1].incarnation != first


async def test_metrics_of_a_retired_replica_vanish(model_dir: Path) -> None:
    port = free_port()

    def series() -> set[str]:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return {line for line in lines if 'dp_rank="1"' in line}

    async with scene(model_dir, dp=2, metrics_port=port) as group:
        ranks = await group.launcher.incarnation(1, 0)
        output = group.router.submit([5], dp_rank=1)
        [add] = await ranks.adds(1)
        ranks.step([Row(add.request_id, 0, [9], LENGTH)])
        await output.result()
        assert any("requests_total" in line for line in await asyncio.to_thread(series))
        await group.scale(1)
        await group.until_dp(1)
        assert await asyncio.to_thread(series) == set()


async def test_a_group_that_is_about_to_end_is_not_scaled(model_dir: Path) -> None:
    async with scene(model_dir) as group:
        await group.stub.Drain(pb.DrainRequest())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await group.scale(2)
        assert isinstance(from_rpc_error(raised.value), errors.Draining)
