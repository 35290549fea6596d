"""FleetService: the fleet for administrators. Converts, calls, converts; decides nothing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Final, Protocol

import grpc
from google.protobuf.duration_pb2 import Duration

from radixmesh.errors import InvalidRequest
from radixmesh.router.v1 import fleet_service_pb2 as pb
from radixmesh.router.v1 import router_service_pb2
from radixmesh.router.v1.fleet_service_pb2_grpc import (
    FleetServiceServicer,
    add_FleetServiceServicer_to_server,
)
from router.discovery.member import is_address, is_name
from router.fleet.views import CandidatePrice, ReplicaView
from router.policy.choice import Policy
from router.request import GenerateRequest
from router.wire import to_request

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["FleetService"].full_name

WATCH_INTERVAL_S: Final = 1.0
WATCH_INTERVAL_MIN_S: Final = 0.05

Context = grpc.aio.ServicerContext[Any, Any]


class Fleet(Protocol):
    """What is operated; `router.fleet.registry.Fleet`."""

    policy: Policy

    def replicas(self) -> Sequence[ReplicaView]:
        """Return all replicas."""
        ...

    def add_group(self, address: str, group_id: str = "") -> str:
        """Attach a group; return its name."""
        ...

    def remove_group(self, group_id: str) -> None:
        """Detach a group."""

    def drain_group(
        self, group_id: str, *, remove: bool = False, within_s: float | None = None
    ) -> int:
        """Send nothing new there; return how many requests run there."""
        ...

    async def changed(self) -> None:
        """Return after the next change."""


class Explains(Protocol):
    """Who turns a request into ids and prices them; the pipeline."""

    def explain(self, request: GenerateRequest) -> Awaitable[tuple[int, Sequence[CandidatePrice]]]:
        """Return the number of prompt ids, and the price at every replica."""
        ...


class FleetService(FleetServiceServicer):
    """FleetService on a fleet and a pipeline."""

    def __init__(self, fleet: Fleet, pipeline: Explains) -> None:
        self._fleet = fleet
        self._pipeline = pipeline

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        add_FleetServiceServicer_to_server(self, server)

    async def ListReplicas(
        self, request: pb.ListReplicasRequest, context: Context
    ) -> pb.ListReplicasResponse:
        return pb.ListReplicasResponse(replicas=self._replicas())

    async def AddGroup(self, request: pb.AddGroupRequest, context: Context) -> pb.AddGroupResponse:
        if not is_address(request.address):
            raise InvalidRequest("the address must be HOST:PORT", field="address")
        if not is_name(request.group_id):
            raise InvalidRequest("the name must be one short line of text", field="group_id")
        group_id = self._fleet.add_group(request.address, request.group_id)
        return pb.AddGroupResponse(group_id=group_id)

    async def RemoveGroup(
        self, request: pb.RemoveGroupRequest, context: Context
    ) -> pb.RemoveGroupResponse:
        self._fleet.remove_group(request.group_id)
        return pb.RemoveGroupResponse()

    async def DrainGroup(
        self, request: pb.DrainGroupRequest, context: Context
    ) -> pb.DrainGroupResponse:
        running = self._fleet.drain_group(
            request.group_id, remove=request.remove_when_idle, within_s=drain_within_s(request)
        )
        return pb.DrainGroupResponse(in_flight_count=running)

    async def ExplainRoute(
        self, request: pb.ExplainRouteRequest, context: Context
    ) -> pb.ExplainRouteResponse:
        remaining_s: float | None = context.time_remaining()
        wanted = to_request(request.request, timeout_s=remaining_s)
        prompt_tokens, prices = await self._pipeline.explain(wanted)
        return pb.ExplainRouteResponse(
            prompt_token_count=prompt_tokens,
            policy=self._fleet.policy.name,
            candidates=[to_candidate(price) for price in prices],
        )

    async def WatchFleet(
        self, request: pb.WatchFleetRequest, context: Context
    ) -> AsyncIterator[pb.WatchFleetResponse]:
        interval_s = watch_interval_s(request)
        last: list[pb.Replica] | None = None
        while True:
            replicas = self._replicas()
            if replicas != last:
                last = replicas
                yield pb.WatchFleetResponse(replicas=replicas)
            await asyncio.sleep(interval_s)
            await self._fleet.changed()

    def _replicas(self) -> list[pb.Replica]:
        return [to_replica(view) for view in self._fleet.replicas()]


def watch_interval_s(request: pb.WatchFleetRequest) -> float:
    """Return the wanted pause between two messages, in seconds.

    Raises:
        InvalidRequest: It is negative.
    """
    if not request.HasField("min_interval"):
        return WATCH_INTERVAL_S
    return max(WATCH_INTERVAL_MIN_S, _seconds(request.min_interval, "min_interval"))


def drain_within_s(request: pb.DrainGroupRequest) -> float | None:
    """Return after how many seconds what runs there is handed over; None: never.

    Raises:
        InvalidRequest: It is negative.
    """
    if not request.HasField("deadline"):
        return None
    return _seconds(request.deadline, "deadline")


def _seconds(wanted: Duration, field: str) -> float:
    seconds: float = wanted.seconds + wanted.nanos / 1e9
    if seconds < 0:
        raise InvalidRequest(f"{field} must not be negative", field=field)
    return seconds


def to_replica(view: ReplicaView) -> pb.Replica:
    """Return the wire form of one replica."""
    return pb.Replica(
        group_id=view.group_id,
        address=view.address,
        dp_rank=view.dp_rank,
        model=view.model,
        incarnation=view.incarnation,
        phase=pb.ReplicaPhase.ValueType(view.phase),
        view=router_service_pb2.ViewState.ValueType(view.view),
        running_count=view.running,
        waiting_count=view.waiting,
        in_flight_count=view.in_flight,
        cached_block_count=view.cached_blocks,
        kv_block_count=view.kv_blocks,
        free_block_count=view.free_blocks,
        block_tokens=view.block_tokens,
        routed_count=view.routed,
        prompt_token_count=view.prompt_tokens,
        cached_token_count=view.cached_tokens,
        prefill_rate=view.prefill_rate,
        topology=view.topology,
        reason=view.reason,
    )


def to_candidate(price: CandidatePrice) -> pb.CandidatePrice:
    """Return the wire form of one price."""
    return pb.CandidatePrice(
        group_id=price.group_id,
        dp_rank=price.dp_rank,
        eligible=price.eligible,
        reason=price.reason,
        prompt_blocks=price.prompt_blocks,
        matched_blocks=price.matched_blocks,
        wait_s=price.wait_s,
        prefill_s=price.prefill_s,
        alpha=price.alpha,
        crowding_s=price.crowding_s,
        eviction_s=price.eviction_s,
        total_s=price.total_s,
        chosen=price.chosen,
        phase=pb.ReplicaPhase.ValueType(price.phase),
        held_blocks=price.held_blocks,
        running_count=price.running,
        waiting_count=price.waiting,
        view=router_service_pb2.ViewState.ValueType(price.view),
    )
