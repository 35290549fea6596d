"""WorkerService: the contract's calls on the group. Converts, calls, converts; decides nothing."""

import secrets
from collections.abc import AsyncIterator

import grpc.aio

from radixmesh.blocks import unpack_ids
from radixmesh.common.v1 import generation_pb2
from radixmesh.rpc.link import Identity, LinkLimits, serve_link
from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1 import worker_service_pb2_grpc
from worker.front import wire
from worker.front.group import Group
from worker.front.plain_call import Piece, PlainCall
from worker.front.router_link import RouterLink
from worker.request import GOES_ON

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name

# Of a plain Generate that names none; links always name one.
DEFAULT_MAX_TOKENS = 256

Context = grpc.aio.ServicerContext


class WorkerService(worker_service_pb2_grpc.WorkerServiceServicer):
    """The group behind gRPC."""

    def __init__(self, group: Group, identity: Identity, limits: LinkLimits) -> None:
        self._group = group
        self._identity = identity
        self._limits = limits

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self, server)

    async def Attach(  # type: ignore[override]  # the link writes by itself
        self,
        request_iterator: AsyncIterator[pb.AttachRequest],
        context: "Context[pb.AttachRequest, pb.AttachResponse]",
    ) -> None:
        # The first frame describes the group, so a router that comes early waits for a rank.
        await self._group.description.complete()
        await serve_link(
            request_iterator,
            context,
            up=pb.AttachResponse,
            identity=self._identity,
            accept=lambda session: RouterLink(session, self._group),
            limits=self._limits,
        )

    async def Generate(
        self,
        request: pb.GenerateRequest,
        context: "Context[pb.GenerateRequest, pb.GenerateResponse]",
    ) -> AsyncIterator[pb.GenerateResponse]:
        room = self._group.info.max_model_len - len(request.prompt_ids)
        ask = wire.to_plain_ask(
            request,
            seed=secrets.randbits(63),
            max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)),
            timeout_ms=int((context.time_remaining() or 0) * 1000),
        )
        call = PlainCall(logprobs=ask.sampling.logprobs)
        job = self._group.submit(call, 0, ask)
        usage = generation_pb2.Usage(prompt_tokens=len(request.prompt_ids))
        try:
            async for piece in call.pieces():
                yield _answer(piece, usage)
        finally:
            self._group.cancel([job])

    async def GetGroup(
        self,
        request: pb.GetGroupRequest,
        context: "Context[pb.GetGroupRequest, pb.GetGroupResponse]",
    ) -> pb.GetGroupResponse:
        replicas = self._group.replicas
        return pb.GetGroupResponse(
            instance_id=self._identity.instance_id,
            info=wire.info(self._group.info),
            statuses=[wire.status(replica) for replica in replicas],
            load=wire.load(replicas, {}),
        )

    async def Drain(
        self, request: pb.DrainRequest, context: "Context[pb.DrainRequest, pb.DrainResponse]"
    ) -> pb.DrainResponse:
        dp_rank = request.dp_rank if request.HasField("dp_rank") else None
        return pb.DrainResponse(running_count=self._group.drain(dp_rank))

    async def FlushCache(
        self,
        request: pb.FlushCacheRequest,
        context: "Context[pb.FlushCacheRequest, pb.FlushCacheResponse]",
    ) -> pb.FlushCacheResponse:
        dp_rank = request.dp_rank if request.HasField("dp_rank") else None
        return pb.FlushCacheResponse(removed_block_count=await self._group.flush(dp_rank))

    async def ScaleReplicas(
        self,
        request: pb.ScaleReplicasRequest,
        context: "Context[pb.ScaleReplicasRequest, pb.ScaleReplicasResponse]",
    ) -> pb.ScaleReplicasResponse:
        return pb.ScaleReplicasResponse(dp=self._group.roster.scale(request.dp))


def _answer(piece: Piece, usage: generation_pb2.Usage) -> pb.GenerateResponse:
    ids = unpack_ids(piece.ids)
    usage.completion_tokens += len(ids)
    usage.cached_tokens = piece.cached_tokens
    answer = pb.GenerateResponse(
        token_ids=ids,
        logprobs=piece.logprobs,
        tops=wire.tops(piece.tops),
        prompt_scores=map(wire.prompt_scores, piece.prompt_scores),
    )
    if piece.finish != GOES_ON:
        answer.finish_reason = piece.finish  # type: ignore[assignment]  # the enum's numbers
        answer.usage.CopyFrom(usage)
        answer.weight_version = piece.weight_version
    return answer
