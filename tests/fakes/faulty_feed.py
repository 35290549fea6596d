"""A gRPC proxy before a worker group that spoils what the group says of its caches.

Knows the worker link's frames. It passes them on as they are, and decodes them only while a
fault is set: then events can be lost or changed, proofs can lie, the feed can fall silent.
Ids and loads always pass, so what goes wrong is the router's picture and nothing else.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from radixmesh.worker.v1.worker_service_pb2 import AttachRequest, AttachResponse

METHOD = "/radixmesh.worker.v1.WorkerService/Attach"
SPOIL = 0x5A5A


class FeedFault(Protocol):
    """What is done to frames while it is set. `acted` counts what it spoiled."""

    acted: int

    def alter(self, frame: AttachResponse) -> None:
        """Spoil a frame on its way to the router."""

    def hear(self, frame: AttachRequest) -> None:
        """Listen to a frame of the router's."""


class Spoiler:
    """A fault that does nothing yet."""

    def __init__(self) -> None:
        self.acted = 0

    def alter(self, frame: AttachResponse) -> None:
        """Leave it as it is."""

    def hear(self, frame: AttachRequest) -> None:
        """Take no notice."""


class LostEvents(Spoiler):
    """The events of one frame never arrive."""

    def alter(self, frame: AttachResponse) -> None:
        if frame.events and not self.acted:
            self.acted = len(frame.events)
            del frame.events[:]


class AlteredEvent(Spoiler):
    """One stored block gets another key."""

    def alter(self, frame: AttachResponse) -> None:
        if self.acted:
            return
        for event in frame.events:
            if event.stored.keys:
                event.stored.keys[-1] ^= SPOIL
                self.acted = 1
                return


class LyingDigests(Spoiler):
    """No proof is right."""

    def alter(self, frame: AttachResponse) -> None:
        for digest in frame.digests:
            digest.xor_keys ^= SPOIL
        self.acted += len(frame.digests)


class Silence(Spoiler):
    """No snapshot, event or proof arrives until the router asks for a snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def alter(self, frame: AttachResponse) -> None:
        if not self.broken:
            self.acted += len(frame.events) + len(frame.digests)
            for part in ("snapshots", "events", "digests"):
                frame.ClearField(part)

    def hear(self, frame: AttachRequest) -> None:
        self.broken = self.broken or bool(frame.resnapshots)


class FeedProxy:
    """Forwards links to a group's front.

    Attributes:
        port: Where it listens.
        fault: What it does to frames; None passes them on unread.
    """

    def __init__(self, target: str) -> None:
        self.port = 0
        self.fault: FeedFault | None = None
        self._target = target
        self._calls: set[Any] = set()

    def hang_up(self) -> None:
        """End all links; a router dials again."""
        for call in list(self._calls):
            call.cancel()

    async def attach(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Serve one link by another one to the front."""
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(self._target, options=options) as channel:
            call: Any = channel.stream_stream(METHOD)()
            self._calls.add(call)
            upward = asyncio.ensure_future(self._pass_up(requests, call))
            try:
                async for data in call:
                    await context.write(self._altered(data))
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details() or "")
            except asyncio.CancelledError:
                # Of the call to the front, when it was hung up; else of this one.
                if not call.cancelled():
                    raise
            finally:
                upward.cancel()
                call.cancel()
                self._calls.discard(call)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "hung up")

    async def _pass_up(self, requests: AsyncIterator[bytes], call: Any) -> None:
        try:
            async for data in requests:
                if self.fault is not None:
                    self.fault.hear(AttachRequest.FromString(data))
                await call.write(data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the other direction says why

    def _altered(self, data: bytes) -> bytes:
        if self.fault is None:
            return data
        frame = AttachResponse.FromString(data)
        self.fault.alter(frame)
        return frame.SerializeToString()


class _Routes(grpc.GenericRpcHandler):
    def __init__(self, proxy: FeedProxy) -> None:
        self._attach: Any = grpc.stream_stream_rpc_method_handler(proxy.attach)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._attach if details.method == METHOD else None


@asynccontextmanager
async def feed_proxy_to(target: str) -> AsyncGenerator[FeedProxy, None]:
    """Run a proxy on a free port."""
    proxy = FeedProxy(target)
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    server.add_generic_rpc_handlers((_Routes(proxy),))
    proxy.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield proxy
    finally:
        proxy.hang_up()
        await server.stop(0)
