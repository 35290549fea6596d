"""The blocking client. Knows calls and their retries; shapes are in `codec`.

Example::

    with Client("127.0.0.1:30001") as mesh:
        for chunk in mesh.generate("Once upon a time"):
            ...
"""

import time
from collections.abc import Generator
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc
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

__all__ = ["Client", "FleetClient"]

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class _Calls:
    """A channel and how calls on it are made."""

    def __init__(self, address: str, api_key: str, retry: Retry | None) -> None:
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._api_key = api_key
        self._retry = retry or Retry()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all calls and the connection."""
        self._channel.close()

    def _unary(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Answer]",
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
                    return method(request, timeout=UNARY_TIMEOUT_S, metadata=labels)
            except MeshError as error:
                pause = self._retry.pause(error, attempt) if repeatable else None
                if pause is None:
                    raise
            time.sleep(pause)


class Client(_Calls):
    """Talks to a router's public API. Safe to share between threads.

    Args:
        address: `host:port` of the router's gRPC API.
        api_key: Its key, if it wants one.
        retry: When a call is made again.
    """

    def __init__(self, address: str, *, api_key: str = "", retry: Retry | None = None) -> None:
        super().__init__(address, api_key, retry)
        self._stub = router_service_pb2_grpc.RouterServiceStub(self._channel)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generator[Chunk, None, None]:
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
                    for message in call:
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
            time.sleep(pause)

    def complete(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Return the whole outputs for a prompt.

        Raises:
            MeshError: The request failed.
        """
        collector = codec.Collector()
        for chunk in self.generate(prompt, **options):
            collector.take(chunk)
        return collector.result()

    def list_models(self) -> list[Model]:
        """Return what this mesh serves."""
        request = router_service_pb2.ListModelsRequest()
        return codec.to_models(self._unary(self._stub.ListModels, request))


class FleetClient(_Calls):
    """Operates the fleet of one router.

    Args:
        address: `host:port` of the router's FleetService.
        retry: When a call that changes nothing is made again.
    """

    def __init__(self, address: str, *, api_key: str = "", retry: Retry | None = None) -> None:
        super().__init__(address, api_key, retry)
        self._stub = fleet_service_pb2_grpc.FleetServiceStub(self._channel)

    def list_replicas(self) -> list[Replica]:
        """Return all replicas that the router knows."""
        request = fleet_service_pb2.ListReplicasRequest()
        return codec.to_replicas(self._unary(self._stub.ListReplicas, request).replicas)

    def add_group(self, address: str, *, group_id: str = "") -> str:
        """Attach a worker group; return its name in the router."""
        request = fleet_service_pb2.AddGroupRequest(address=address, group_id=group_id)
        return self._unary(self._stub.AddGroup, request, repeatable=False).group_id

    def remove_group(self, group_id: str) -> None:
        """Detach a group; its streams are resumed elsewhere."""
        request = fleet_service_pb2.RemoveGroupRequest(group_id=group_id)
        self._unary(self._stub.RemoveGroup, request, repeatable=False)

    def drain_group(
        self, group_id: str, *, remove: bool = False, within_s: float | None = None
    ) -> int:
        """Send no new requests to a group; return how many of this router's run there.

        Args:
            group_id: Its name in the router.
            remove: Detach it when nothing of the router runs there any more.
            within_s: What still runs there after so many seconds is handed over to others.
        """
        request = codec.to_drain(group_id, remove=remove, within_s=within_s)
        return self._unary(self._stub.DrainGroup, request).in_flight_count

    def explain_route(self, prompt: Prompt, **options: Unpack[Options]) -> Explanation:
        """Price a prompt against every replica without sending it."""
        request = fleet_service_pb2.ExplainRouteRequest(request=codec.to_request(prompt, **options))
        return codec.to_explanation(self._unary(self._stub.ExplainRoute, request))

    def watch_fleet(self, *, min_interval_s: float = 1.0) -> Generator[list[Replica], None, None]:
        """Stream all replicas: at once, then after changes. Closing the generator ends it."""
        interval = Duration()
        interval.FromMilliseconds(round(min_interval_s * 1000))
        call = self._stub.WatchFleet(
            fleet_service_pb2.WatchFleetRequest(min_interval=interval),
            metadata=metadata(self._api_key),
        )
        try:
            with translated():
                for message in call:
                    yield codec.to_replicas(message.replicas)
        finally:
            call.cancel()
