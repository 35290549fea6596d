"""The worker's plain RPCs, over a real channel, with ranks that the test plays."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from radixmesh import errors
from radixmesh.common.v1.sampling_pb2 import SamplingParams
from radixmesh.rpc.status import from_rpc_error
from radixmesh.worker.v1 import feed_pb2
from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.router_end import attach
from tests.fakes.scripted_ranks import Row, ScriptedLauncher, ScriptedRanks
from tests.fakes.worker_front import run_front
from worker.request import LENGTH, Answer, CacheChange, PromptScores, Started, Tops

if TYPE_CHECKING:  # the asyncio form of a stub is known to type checkers only
    from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceAsyncStub


@asynccontextmanager
async def group(
    model_dir: Path, **flags: Any
) -> AsyncGenerator[tuple["WorkerServiceAsyncStub", ScriptedRanks], None]:
    """A group that is up, and a stub for it."""
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher, **flags) as address:
        async with attach(address) as router:
            await router.until_up(0)
        async with grpc.aio.insecure_channel(address) as channel:
            yield WorkerServiceStub(channel), await launcher.incarnation(0, 0)


async def test_generate_streams_ids_and_ends_with_reason_usage_and_weights(
    model_dir: Path,
) -> None:
    async with group(model_dir, weight_version="w1") as (stub, ranks):
        call = stub.Generate(pb.GenerateRequest(prompt_ids=[5, 6, 7]))
        [add] = await ranks.adds(1)
        ranks.step([Row(add.request_id, 0, [10])], started=[Started(add.request_id, 2, 0)])
        first = await call.read()
        assert isinstance(first, pb.GenerateResponse)
        assert list(first.token_ids) == [10]
        assert first.finish_reason == 0
        assert not first.HasField("usage")
        assert first.weight_version == ""
        ranks.step([Row(add.request_id, 1, [11, 12], LENGTH)])
        last = await call.read()
        assert isinstance(last, pb.GenerateResponse)
        assert await call.read() is grpc.aio.EOF
        assert list(last.token_ids) == [11, 12]
        assert last.finish_reason == LENGTH
        assert last.weight_version == "w1"
        usage = last.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (3, 2, 3)


async def test_scores_come_with_the_ids_that_they_are_about(model_dir: Path) -> None:
    sampling = SamplingParams(logprobs=True, top_logprobs=2, prompt_logprobs=True)
    async with group(model_dir) as (stub, ranks):
        call = stub.Generate(pb.GenerateRequest(prompt_ids=[5, 6, 7], sampling=sampling))
        [add] = await ranks.adds(1)
        assert add.sampling.top_logprobs == 2
        assert add.sampling.prompt_logprobs
        prompt = Tops([2, 1], [6, 9, 7], [-0.5, -0.75, -0.25])
        ranks.step(prompt_scores=[PromptScores(add.request_id, 1, [-0.5, -0.25], prompt)])
        scores = await call.read()
        assert isinstance(scores, pb.GenerateResponse)
        assert scores == pb.GenerateResponse(
            prompt_scores=[
                pb.PromptScores(
                    position=1,
                    logprobs=[-0.5, -0.25],
                    tops=pb.Tops(counts=[2, 1], token_ids=[6, 9, 7], logprobs=[-0.5, -0.75, -0.25]),
                )
            ]
        )
        ranks.step(
            [Row(add.request_id, 0, [10], LENGTH)],
            logprobs=[-1.5],
            tops=Tops([2], [11, 10], [-1.0, -1.5]),
        )
        last = await call.read()
        assert isinstance(last, pb.GenerateResponse)
        assert list(last.logprobs) == [-1.5]
        assert last.tops == pb.Tops(counts=[2], token_ids=[11, 10], logprobs=[-1.0, -1.5])
        assert not last.prompt_scores


async def test_a_client_that_leaves_frees_its_request(model_dir: Path) -> None:
    async with group(model_dir) as (stub, ranks):
        call = stub.Generate(pb.GenerateRequest(prompt_ids=[5]))
        [add] = await ranks.adds(1)
        ranks.step([Row(add.request_id, 0, [10])])
        await call.read()
        call.cancel()
        async with asyncio.timeout(1):
            assert await ranks.cancelled(1) == [add.request_id]


async def test_a_deadline_travels_to_the_ranks(model_dir: Path) -> None:
    async with group(model_dir) as (stub, ranks):
        call = stub.Generate(pb.GenerateRequest(prompt_ids=[5]), timeout=5)
        [add] = await ranks.adds(1)
        assert 1_000 < add.timeout_ms < 5_500  # gRPC rounds deadlines up
        call.cancel()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.GenerateRequest(), errors.InvalidRequest),
        (pb.GenerateRequest(prompt_ids=[1000]), errors.UnknownToken),
        (pb.GenerateRequest(prompt_ids=[1] * 600), errors.PromptTooLong),
        (pb.GenerateRequest(prompt_ids=[1], dp_rank=9), errors.GroupNotFound),
        (
            pb.GenerateRequest(prompt_ids=[1], sampling=SamplingParams(min_p=2)),
            errors.BadSampling,
        ),
    ],
)
async def test_a_bad_request_is_a_typed_status(
    model_dir: Path, request_: pb.GenerateRequest, error: type[errors.MeshError]
) -> None:
    async with group(model_dir) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(request_).read()
        assert type(from_rpc_error(raised.value)) is error


async def test_the_loss_of_the_replica_is_a_typed_status(model_dir: Path) -> None:
    async with group(model_dir) as (stub, ranks):
        call = stub.Generate(pb.GenerateRequest(prompt_ids=[5]))
        await ranks.adds(1)
        ranks.die()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call.read()
        assert isinstance(from_rpc_error(raised.value), errors.GroupLost)


async def test_get_group_describes_replicas_and_their_load(model_dir: Path) -> None:
    async with group(model_dir, model_name="poet") as (stub, ranks):
        answer = await stub.GetGroup(pb.GetGroupRequest())
        assert answer.info.model == "poet"
        [status] = answer.statuses
        assert status.state == feed_pb2.REPLICA_STATE_UP
        assert status.incarnation == ranks.incarnation
        assert list(answer.load.free_block_counts) == [200]
        assert len(answer.instance_id) == 32


async def test_drain_refuses_new_work_and_says_what_still_runs(model_dir: Path) -> None:
    async with group(model_dir) as (stub, ranks):
        running = stub.Generate(pb.GenerateRequest(prompt_ids=[5]))
        [add] = await ranks.adds(1)
        answer = await stub.Drain(pb.DrainRequest(dp_rank=0))
        assert answer.running_count == 1
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(pb.GenerateRequest(prompt_ids=[5], dp_rank=0)).read()
        assert isinstance(from_rpc_error(raised.value), errors.Draining)
        ranks.step([Row(add.request_id, 0, [9], LENGTH)])
        assert [list(each.token_ids) async for each in running] == [[9]]


async def test_flush_empties_the_cache_and_counts(model_dir: Path) -> None:
    async with group(model_dir) as (stub, ranks):
        ranks.step(changes=[CacheChange(0, [10, 11])])
        call = stub.FlushCache(pb.FlushCacheRequest())
        flush = await ranks.flush()
        ranks.step(changes=[CacheChange(cleared=True)], answers=[Answer(flush.token, 2)])
        assert (await call).removed_block_count == 2


async def test_a_flush_does_not_outlive_its_replica(model_dir: Path) -> None:
    async with group(model_dir) as (stub, ranks):
        call = stub.FlushCache(pb.FlushCacheRequest(dp_rank=0))
        await ranks.flush()
        ranks.die()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call
        assert isinstance(from_rpc_error(raised.value), errors.GroupLost)


@pytest.mark.parametrize("dp", [0, 1025])
async def test_a_group_has_from_1_to_1024_replicas(model_dir: Path, dp: int) -> None:
    async with group(model_dir) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.ScaleReplicas(pb.ScaleReplicasRequest(dp=dp))
        failure = from_rpc_error(raised.value)
        assert isinstance(failure, errors.InvalidRequest)
        assert failure.field == "dp"
