"""The body of a servicer's `Attach`: hello, then a session until the link ends. Knows no entry."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc.aio

from radixmesh.errors import DeadlineExceeded, LinkLost, MeshError
from radixmesh.rpc.frames import (
    DEFAULT_LIMITS,
    Frame,
    Identity,
    LinkLimits,
    Peer,
    hello,
    introduced,
)
from radixmesh.rpc.lanes import Lane
from radixmesh.rpc.pump import Pump
from radixmesh.rpc.session import Handler, Session
from radixmesh.rpc.status import conceal

__all__ = ["serve_link"]

logger = logging.getLogger(__name__)

Up = TypeVar("Up", bound=Frame)
Down = TypeVar("Down", bound=Frame)


async def serve_link(
    requests: AsyncIterator[Down],
    context: grpc.aio.ServicerContext[Down, Up],
    *,
    up: type[Up],
    identity: Identity,
    accept: Callable[[Session[Up]], Handler[Down]],
    limits: LinkLimits = DEFAULT_LIMITS,
) -> None:
    """Serve one link.

    Args:
        requests: The servicer's request iterator.
        context: The servicer's context.
        up: The class of the frames to the router.
        identity: This process.
        accept: Makes the handler of a new session. What it sends travels in the
            first frame, with the hello.
        limits: Bounds and intervals.

    Raises:
        MeshError: Why the link ended, for the status of the stream.
    """
    stream = aiter(requests)
    first = await _first(stream, limits)
    if first is None:
        return
    try:
        peer = introduced(first)
    except MeshError as error:
        logger.warning("link refused", extra={"error": error.message})
        raise
    served = _Served(up, peer, limits, accept)
    served.greet(hello(up, identity, limits))
    await served.run(first, stream, context)


async def _first(stream: AsyncIterator[Down], limits: LinkLimits) -> Down | None:
    try:
        async with asyncio.timeout(limits.connect_timeout_s):
            return await anext(stream, None)
    except TimeoutError:
        raise DeadlineExceeded("no hello came") from None


class _Served(Generic[Down, Up]):
    """A session, its pump and its handler, tied together."""

    def __init__(
        self,
        up: type[Up],
        peer: Peer,
        limits: LinkLimits,
        accept: Callable[[Session[Up]], Handler[Down]],
    ) -> None:
        self._peer = peer
        self._accept = accept
        self._pump: Pump[Up, Down] = Pump(up, limits, self._on_frame, self._on_written)
        self._session = Session(peer, self._pump, up, limits)
        self._handler: Handler[Down] | None = None

    def greet(self, greeting: Up) -> None:
        """Queue the hello, and behind it what the new handler sends."""
        self._pump.push(greeting.SerializeToString(), Lane.CONTROL)
        self._handler = self._accept(self._session)

    def _on_frame(self, frame: Down) -> None:
        if self._handler:
            self._handler.on_frame(frame)
        # After the content: a frame may carry both an entry and its cancel.
        self._session.take_cancels(frame)

    def _on_written(self) -> None:
        if self._session.take_feed_drop() and self._handler:
            self._call_out(self._handler.on_feed_dropped)

    async def run(
        self,
        first: Down,
        stream: AsyncIterator[Down],
        context: grpc.aio.ServicerContext[Down, Up],
    ) -> None:
        """Serve until the link ends.

        Raises:
            MeshError: This side ended the link.
        """

        async def read() -> Any:
            return await anext(stream, grpc.aio.EOF)

        log = {"peer": self._peer.name, "instance": self._peer.instance_id}
        logger.info("link up", extra=log)
        error: MeshError = LinkLost("the link was closed")
        try:
            # By itself, because a link may end in the middle of its first write, and a
            # status can't follow initial metadata that is still on its way.
            await context.send_initial_metadata(())
            self._pump.deliver(first)
            error = await self._pump.run(read, context.write)
        finally:
            logger.info("link down", extra={**log, "error": error.message})
            self._pump.end(error)
            self._session.lose(LinkLost(error.message))
            if self._handler:
                closed = self._handler.on_closed
                self._call_out(lambda: closed(error))
        if not isinstance(error, LinkLost):
            raise error

    def _call_out(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as fault:  # noqa: BLE001 - logged by conceal; ends this link only
            self._pump.end(conceal(fault, "in a session's handler"))
