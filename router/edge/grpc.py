"""The public gRPC API on the pipeline. Knows protobuf and metadata; decides nothing."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Final, Protocol

import grpc

from radixmesh.errors import DeadlineExceeded, SlowConsumer
from radixmesh.router.v1 import router_service_pb2 as pb
from radixmesh.router.v1.router_service_pb2_grpc import (
    RouterServiceServicer,
    add_RouterServiceServicer_to_server,
)
from radixmesh.rpc.interceptors import REQUEST_ID_KEY
from radixmesh.telemetry.logs import request_id
from router.edge.admission import LINGER_S, WRITE_TIMEOUT_S, ApiKey
from router.fleet.ask import ModelInfo
from router.request import Event, GenerateRequest
from router.wire import to_request, to_response

SERVICE_NAME: Final = pb.DESCRIPTOR.services_by_name["RouterService"].full_name

Context = grpc.aio.ServicerContext[Any, Any]


class Pipeline(Protocol):
    """What the edge stands on."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """Run a request; closing the generator frees all that it holds."""
        ...

    def models(self) -> Sequence[ModelInfo]:
        """Return the served models."""
        ...


class RouterService(RouterServiceServicer):
    """RouterService.

    Args:
        pipeline: Runs requests.
        api_key: What clients must bring.
        request_timeout_s: The longest time of a request.
        write_timeout_s: A client that takes no message for so long is let go.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        api_key: ApiKey,
        request_timeout_s: float,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        self._pipeline = pipeline
        self._api_key = api_key
        self._request_timeout_s = request_timeout_s
        self._write_timeout_s = write_timeout_s

    def add_to(self, server: grpc.aio.Server) -> None:
        """Offer the service on a server."""
        add_RouterServiceServicer_to_server(self, server)

    # It writes by itself instead of yielding: a cancel may land in a write.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        await self._greet(context)
        timeout_s = min(self._request_timeout_s, _remaining_s(context))
        wanted = to_request(request, request_id=request_id.get(), timeout_s=timeout_s)
        try:
            async with (
                asyncio.timeout(timeout_s + LINGER_S),
                aclosing(self._pipeline.generate(wanted)) as events,
            ):
                async for event in events:
                    await self._write(to_response(event), context)
        except TimeoutError:
            raise DeadlineExceeded("the client did not read until the deadline") from None

    async def _write(self, response: pb.GenerateResponse, context: Context) -> None:
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await context.write(response)
        except TimeoutError:
            # gRPC keeps this message and the error for a client that reads again.
            raise SlowConsumer("the client takes nothing", seconds=self._write_timeout_s) from None

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        await self._greet(context)
        return pb.ListModelsResponse(
            models=[
                pb.Model(
                    name=model.name,
                    max_model_len=model.max_model_len,
                    fingerprint=model.fingerprint,
                    ready_replica_count=model.ready_replicas,
                )
                for model in self._pipeline.models()
            ]
        )

    async def _greet(self, context: Context) -> None:
        await context.send_initial_metadata(((REQUEST_ID_KEY, request_id.get()),))
        self._api_key.check(_authorization(context))


def _authorization(context: Context) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None


def _remaining_s(context: Context) -> float:
    remaining: float | None = context.time_remaining()
    return float("inf") if remaining is None else remaining
