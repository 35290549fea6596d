"""The asyncio client. Knows calls and their retries; shapes are in `codec`.

Example::

    async with AsyncClient("127.0.0.1:30001") as mesh:
        async for chunk in mesh.generate("Once upon a time"):
            ...
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from radixmesh.client import codec
from radixmesh.client.calls import (
    CHANNEL_OPTIONS,
    UNARY_TIMEOUT_S,
    Retry,
    metadata,
    timeout_s,
    translated,
)
from radixmesh.client.types import Chunk, Explanation, Model, Options, Prompt, Replica, Result
from radixmesh.errors import MeshError
from radixmesh.router.v1 import (
    fleet_service_pb2,
    fleet_service_pb2_grpc,
    router_service_pb2,
    router_service_pb2_grpc,
)

__all__ = ["AsyncClient", "AsyncFleetClient"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class _Calls:
    """A channel and how calls on it are made."""

    def __init__(self, address: str, api_key: str, retry: Retry | None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._api_key = api_key
        self._retry = retry or Retry()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls and the connection."""
        await self._channel.close()

    async def _unary(
        self,
        method: "grpc.aio.UnaryUnaryMultiCallable[Request, Answer]",
        request: Request,
        *,
        repeatable: bool = True,
    ) -> Answer:
        labels = metadata(self._api_key)
        attempt = 0
        while True:
            attempt += 1
            try:
                with translated():
                    return await method(request, timeout=UNARY_TIMEOUT_S, metadata=labels)
            except MeshError as error:
                pause = self._retry.pause(error, attempt) if repeatable else None
                if pause is None:
                    raise
            await asyncio.sleep(pause)


class AsyncClient(_Calls):
    """Talks to a router's public API. For one event loop.

    Args:
        address: `host:port` of the router's gRPC API.
        api_key: Its key, if it wants one.
        retry: When a call is made again.
    """

    def __init__(self, address: str, *, api_key: str = "", retry: Retry | None = None) -> None:
        super().__init__(address, api_key, retry)
        self._stub = router_service_pb2_grpc.RouterServiceStub(self._channel)

    async def generate(
        self, prompt: Prompt, **options: Unpack[Options]
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the outputs for a prompt. Closing the generator cancels the request.

        Raises:
            MeshError: The request failed, at once or later in the stream.
        """
        request = codec.to_request(prompt, **options)
        labels = metadata(self._api_key, options.get("request_id", ""))
        deadline = time.monotonic() + timeout_s(options)
        attempt = 0
        while True:
            attempt += 1
            started = False
            call = self._stub.Generate(
                request, timeout=max(deadline - time.monotonic(), 0.001), metadata=labels
            )
            try:
                with translated():
                    async for message in call:
                        started = True
                        yield codec.to_chunk(message)
            except MeshError as error:
                pause = None if started else self._retry.pause(error, attempt)
                if pause is None:
                    raise
            else:
                return
            finally:
                call.cancel()
            await asyncio.sleep(pause)

    async def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Return the whole outputs for a prompt.

        Raises:
            MeshError: The request failed.
        """
        collector = codec.Collector()
        async for chunk in self.generate(prompt, **options):
            collector.take(chunk)
        return collector.result()

    async def list_models(self) -> list[Model]:
        """Return what this mesh serves."""
        request = router_service_pb2.ListModelsRequest()
        return codec.to_models(await self._unary(self._stub.ListModels, request))


class AsyncFleetClient(_Calls):
    """Operates the fleet of one router.

    Args:
        address: `host:port` of the router's FleetService.
        retry: When a call that changes nothing is made again.
    """

    def __init__(self, address: str, *, api_key: str = "", retry: Retry | None = None) -> None:
        super().__init__(address, api_key, retry)
        self._stub = fleet_service_pb2_grpc.FleetServiceStub(self._channel)

    async def list_replicas(self) -> list[Replica]:
        """Return all replicas that the router knows."""
        request = fleet_service_pb2.ListReplicasRequest()
        return codec.to_replicas((await self._unary(self._stub.ListReplicas, request)).replicas)

    async def add_group(self, address: str, *, group_id: str = "") -> str:
        """Attach a worker group; return its name in the router."""
        request = fleet_service_pb2.AddGroupRequest(address=address, group_id=group_id)
        return (await self._unary(self._stub.AddGroup, request, repeatable=False)).group_id

    async def remove_group(self, group_id: str) -> None:
        """Detach a group; its streams are resumed elsewhere."""
        request = fleet_service_pb2.RemoveGroupRequest(group_id=group_id)
        await self._unary(self._stub.RemoveGroup, request, repeatable=False)

    async def drain_group(
        self, group_id: str, *, remove: bool = False, within_s: float | None = None
    ) -> int:
        """Send no new requests to a group; return how many of this router's run there.

        Args:
            group_id: Its name in the router.
            remove: Detach it when nothing of the router runs there any more.
            within_s: What still runs there after so many seconds is handed over to others.
        """
        request = codec.to_drain(group_id, remove=remove, within_s=within_s)
        return (await self._unary(self._stub.DrainGroup, request)).in_flight_count

    async def explain_route(self, prompt: Prompt, **options: Unpack[Options]) -> Explanation:
        """Price a prompt against every replica without sending it."""
        request = fleet_service_pb2.ExplainRouteRequest(request=codec.to_request(prompt, **options))
        return codec.to_explanation(await self._unary(self._stub.ExplainRoute, request))

    async def watch_fleet(
        self, *, min_interval_s: float = 1.0
    ) -> AsyncGenerator[list[Replica], None]:
        """Stream all replicas: at once, then after changes. Closing the generator ends it."""
        interval = Duration()
        interval.FromMilliseconds(round(min_interval_s * 1000))
        call = self._stub.WatchFleet(
            fleet_service_pb2.WatchFleetRequest(min_interval=interval),
            metadata=metadata(self._api_key),
        )
        try:
            with translated():
                async for message in call:
                    yield codec.to_replicas(message.replicas)
        finally:
            call.cancel()
