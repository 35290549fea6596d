"""A router's gRPC services for tests of the client: plays scripts, keeps what it heard."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from radixmesh.common.v1 import generation_pb2
from radixmesh.router.v1 import fleet_service_pb2 as fleet_pb
from radixmesh.router.v1 import fleet_service_pb2_grpc, router_service_pb2_grpc
from radixmesh.router.v1 import router_service_pb2 as router_pb
from radixmesh.rpc.server import Server

HANG = "hang"
Step = router_pb.GenerateResponse | Exception | str

REPLICA = fleet_pb.Replica(
    group_id="g0",
    address="127.0.0.1:9",
    dp_rank=1,
    model="tiny",
    incarnation=2**63,
    phase=fleet_pb.REPLICA_PHASE_READY,
    view=router_pb.VIEW_STATE_EXACT,
    prompt_token_count=100,
    cached_token_count=25,
    topology="dp=2 pp=1 tp=1",
)


def delta(text: str, *token_ids: int, choice: int = 0) -> router_pb.GenerateResponse:
    return router_pb.GenerateResponse(
        delta=router_pb.Delta(choice=choice, text=text, token_ids=token_ids)
    )


def finish(choice: int = 0) -> router_pb.GenerateResponse:
    return router_pb.GenerateResponse(
        finish=router_pb.Finish(
            choice=choice,
            finish_reason=generation_pb2.FINISH_REASON_LENGTH,
            usage=generation_pb2.Usage(prompt_tokens=9, cached_tokens=4, completion_tokens=2),
            receipt=router_pb.RouteReceipt(group_id="g0", predicted_blocks=3, actual_blocks=3),
        )
    )


@dataclass
class FakeRouter(
    router_service_pb2_grpc.RouterServiceServicer, fleet_service_pb2_grpc.FleetServiceServicer
):
    """Each Generate plays the next script, the last one again and again."""

    scripts: Sequence[Sequence[Step]] = ()
    requests: list[Any] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    deadlines: list[float] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        if self.failures:
            raise self.failures.pop(0)

    async def Generate(  # noqa: N802
        self, request: router_pb.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb.GenerateResponse]:
        self._note(request, context)
        script = self.scripts[min(len(self.requests), len(self.scripts)) - 1]
        try:
            for step in script:
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, str):
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            self.ended.set()

    async def ListModels(  # noqa: N802
        self, request: router_pb.ListModelsRequest, context: Any
    ) -> router_pb.ListModelsResponse:
        self._note(request, context)
        model = router_pb.Model(
            name="tiny", max_model_len=64, fingerprint="f", ready_replica_count=2
        )
        return router_pb.ListModelsResponse(models=[model])

    async def ListReplicas(  # noqa: N802
        self, request: fleet_pb.ListReplicasRequest, context: Any
    ) -> fleet_pb.ListReplicasResponse:
        self._note(request, context)
        return fleet_pb.ListReplicasResponse(replicas=[REPLICA])

    async def AddGroup(  # noqa: N802
        self, request: fleet_pb.AddGroupRequest, context: Any
    ) -> fleet_pb.AddGroupResponse:
        self._note(request, context)
        return fleet_pb.AddGroupResponse(group_id=request.group_id or request.address)

    async def RemoveGroup(  # noqa: N802
        self, request: fleet_pb.RemoveGroupRequest, context: Any
    ) -> fleet_pb.RemoveGroupResponse:
        self._note(request, context)
        return fleet_pb.RemoveGroupResponse()

    async def DrainGroup(  # noqa: N802
        self, request: fleet_pb.DrainGroupRequest, context: Any
    ) -> fleet_pb.DrainGroupResponse:
        self._note(request, context)
        return fleet_pb.DrainGroupResponse(in_flight_count=3)

    async def ExplainRoute(  # noqa: N802
        self, request: fleet_pb.ExplainRouteRequest, context: Any
    ) -> fleet_pb.ExplainRouteResponse:
        self._note(request, context)
        price = fleet_pb.CandidatePrice(
            group_id="g0", eligible=True, total_s=0.5, view=router_pb.VIEW_STATE_DEGRADED
        )
        return fleet_pb.ExplainRouteResponse(
            prompt_token_count=7, policy="price", candidates=[price]
        )

    async def WatchFleet(  # noqa: N802
        self, request: fleet_pb.WatchFleetRequest, context: Any
    ) -> AsyncIterator[fleet_pb.WatchFleetResponse]:
        self._note(request, context)
        try:
            yield fleet_pb.WatchFleetResponse(replicas=[REPLICA])
            yield fleet_pb.WatchFleetResponse()
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def serving(router: FakeRouter) -> AsyncGenerator[str, None]:
    """Serve both services on a free port; yields the address."""
    server = Server(
        "127.0.0.1:0",
        [
            (
                "radixmesh.router.v1.RouterService",
                lambda s: router_service_pb2_grpc.add_RouterServiceServicer_to_server(router, s),
            ),
            (
                "radixmesh.router.v1.FleetService",
                lambda s: fleet_service_pb2_grpc.add_FleetServiceServicer_to_server(router, s),
            ),
        ],
    )
    port = await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop()
