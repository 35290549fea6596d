"""FleetService over a real channel: what an administrator sees and does."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio
from google.protobuf.duration_pb2 import Duration

from radixmesh.blocks import ID_BYTES
from radixmesh.router.v1 import fleet_service_pb2 as pb
from radixmesh.router.v1 import router_service_pb2
from radixmesh.router.v1.fleet_service_pb2_grpc import (
    FleetServiceStub,
    add_FleetServiceServicer_to_server,
)
from radixmesh.rpc.server import Server
from radixmesh.rpc.status import from_rpc_error
from router.edge.fleet import SERVICE_NAME, FleetService
from router.fleet.ask import Ask
from router.fleet.registry import Fleet
from router.fleet.views import CandidatePrice
from router.request import GenerateRequest, IdsPrompt
from tests.fakes.fleet import Output, ask, count_ready, running_fleet, spec, until
from tests.fakes.worker import FakeWorker

if TYPE_CHECKING:
    from radixmesh.router.v1.fleet_service_pb2_grpc import FleetServiceAsyncStub

PROMPT = list(range(100, 134))  # 8 blocks, and a beginning of one
READY, DRAINING = 2, 3


class IdsOnly:
    """Prices prompts that are ids already; the pipeline's part."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def explain(self, request: GenerateRequest) -> tuple[int, Sequence[CandidatePrice]]:
        assert isinstance(request.prompt, IdsPrompt)
        ids = request.prompt.ids
        wanted = Ask(
            model=request.model,
            ids=ids,
            fingerprint="",
            max_tokens=8,
            cache_salt=request.cache_salt,
        )
        return len(ids) // ID_BYTES, self._fleet.explain(wanted)


@dataclass
class Rig:
    """A worker group, a fleet on it, and an administrator."""

    worker: FakeWorker
    fleet: Fleet
    stub: "FleetServiceAsyncStub"


@pytest_asyncio.fixture
async def rig() -> AsyncGenerator[Rig]:
    async with FakeWorker(dp=2) as worker, running_fleet(worker.address, ready=2) as fleet:
        service = FleetService(fleet, IdsOnly(fleet))
        server = Server(
            "127.0.0.1:0",
            [(SERVICE_NAME, lambda at: add_FleetServiceServicer_to_server(service, at))],
        )
        port = await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Rig(worker, fleet, FleetServiceStub(channel))
        await server.stop()


async def test_replicas_are_listed_with_what_they_did(rig: Rig) -> None:
    rig.worker.warm(1, PROMPT)
    await until(rig.fleet, lambda: rig.fleet.explain(ask(PROMPT))[0].matched_blocks == 8)
    output = Output()
    rig.fleet.submit(rig.fleet.place(ask(PROMPT)), spec(PROMPT), output)
    await output.ended()
    listed = (await rig.stub.ListReplicas(pb.ListReplicasRequest())).replicas
    assert [(one.dp_rank, one.phase, one.view) for one in listed] == [(0, 2, 1), (1, 2, 1)]
    served = listed[1]
    assert (served.group_id, served.model) == (rig.worker.address, "tiny")
    assert (served.routed_count, served.prompt_token_count) == (1, len(PROMPT))
    assert (served.cached_token_count, served.cached_block_count) == (32, 8)
    assert (served.block_tokens, served.kv_block_count) == (4, 4096)
    assert served.topology == "dp=2 pp=1 tp=1"
    assert listed[0].routed_count == 0


async def test_a_route_is_explained_without_being_taken(rig: Rig) -> None:
    rig.worker.warm(1, PROMPT, salt="s")
    await until(rig.fleet, lambda: rig.fleet.explain(ask(PROMPT, salt="s"))[0].matched_blocks == 8)
    rig.worker.drain_replica(0)
    await until(rig.fleet, lambda: count_ready(rig.fleet) == 1)
    request = router_service_pb2.GenerateRequest(
        model="tiny", token_ids=router_service_pb2.TokenIds(ids=PROMPT), cache_salt="s"
    )
    told = await rig.stub.ExplainRoute(pb.ExplainRouteRequest(request=request))
    assert (told.prompt_token_count, told.policy) == (len(PROMPT), "price")
    best, other = told.candidates
    assert (best.dp_rank, best.eligible, best.matched_blocks, best.prompt_blocks) == (1, True, 8, 8)
    assert (other.dp_rank, other.eligible, other.reason) == (0, False, "draining")
    parts = best.wait_s + best.alpha * best.prefill_s + best.crowding_s + best.eviction_s
    assert best.total_s == pytest.approx(parts)
    assert rig.worker.submits == []


async def test_a_group_is_added_drained_and_removed(rig: Rig) -> None:
    async with FakeWorker() as second:
        added = await rig.stub.AddGroup(pb.AddGroupRequest(address=second.address, group_id="two"))
        assert added.group_id == "two"
        await until(rig.fleet, lambda: count_ready(rig.fleet) == 3)
        second.paused = True
        second.warm(0, PROMPT)
        await until(rig.fleet, lambda: rig.fleet.explain(ask(PROMPT))[0].matched_blocks == 8)
        output = Output()
        rig.fleet.submit(rig.fleet.place(ask(PROMPT)), spec(PROMPT), output)
        drained = await rig.stub.DrainGroup(pb.DrainGroupRequest(group_id="two"))
        assert drained.in_flight_count == 1
        assert rig.fleet.replicas()[-1].phase == DRAINING
        await rig.stub.RemoveGroup(pb.RemoveGroupRequest(group_id="two"))
        await output.ended()
        assert output.error is not None
        listed = (await rig.stub.ListReplicas(pb.ListReplicasRequest())).replicas
        assert {one.group_id for one in listed} == {rig.worker.address}


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda stub: stub.RemoveGroup(pb.RemoveGroupRequest(group_id="x")), "GROUP_NOT_FOUND"),
        (lambda stub: stub.DrainGroup(pb.DrainGroupRequest(group_id="x")), "GROUP_NOT_FOUND"),
        (lambda stub: stub.AddGroup(pb.AddGroupRequest(address="nowhere")), "INVALID_REQUEST"),
        (lambda stub: stub.AddGroup(pb.AddGroupRequest(address="h:70000")), "INVALID_REQUEST"),
        (lambda stub: stub.AddGroup(pb.AddGroupRequest(address="unix:/x:1")), "INVALID_REQUEST"),
        (
            lambda stub: stub.AddGroup(pb.AddGroupRequest(address="h:1", group_id="a\nb")),
            "INVALID_REQUEST",
        ),
        (
            lambda stub: stub.AddGroup(pb.AddGroupRequest(address="h:1", group_id="a" * 257)),
            "INVALID_REQUEST",
        ),
        (
            lambda stub: stub.DrainGroup(
                pb.DrainGroupRequest(group_id="x", deadline=Duration(seconds=-1))
            ),
            "INVALID_REQUEST",
        ),
        (
            lambda stub: stub.ExplainRoute(pb.ExplainRouteRequest()),
            "INVALID_REQUEST",
        ),
    ],
)
async def test_mistakes_are_typed(rig: Rig, call: object, reason: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(rig.stub)  # type: ignore[operator]
    assert from_rpc_error(caught.value).reason == reason


async def test_a_group_is_not_added_twice(rig: Rig) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.stub.AddGroup(pb.AddGroupRequest(address=rig.worker.address, group_id="again"))
    assert from_rpc_error(caught.value).reason == "GROUP_EXISTS"


async def read(
    call: grpc.aio.UnaryStreamCall[pb.WatchFleetRequest, pb.WatchFleetResponse],
) -> pb.WatchFleetResponse:
    message = await call.read()
    assert isinstance(message, pb.WatchFleetResponse)
    return message


async def test_a_watcher_sees_the_fleet_at_once_and_after_changes(rig: Rig) -> None:
    request = pb.WatchFleetRequest()
    request.min_interval.FromMilliseconds(50)
    call = rig.stub.WatchFleet(request)
    async with asyncio.timeout(10):
        first = await read(call)
        assert [one.phase for one in first.replicas] == [READY, READY]
        rig.worker.drain_replica(1)
        while [one.phase for one in (await read(call)).replicas] != [READY, DRAINING]:
            pass
    call.cancel()
