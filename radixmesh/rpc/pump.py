"""One connected stream of frames: writes the outbox, reads, pings, notices silence. Knows no entry.

Both ends of a link are built on this. It ends exactly once, by an error that says
why; `end` may be called from anywhere on the loop.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from radixmesh.errors import InvalidRequest, LinkLost, MeshError, NotSupported
from radixmesh.rpc.frames import Frame, LinkLimits, fragment, ping
from radixmesh.rpc.lanes import Lane, Outbox, Reassembler
from radixmesh.rpc.status import conceal, from_rpc_error

__all__ = ["Pump", "lost"]

logger = logging.getLogger(__name__)

Out = TypeVar("Out", bound=Frame)
In = TypeVar("In", bound=Frame)


class Pump(Generic[Out, In]):
    """Moves frames both ways until the link ends.

    Args:
        out: The class of the frames that it writes.
        limits: Bounds and intervals.
        on_frame: Gets every whole frame; whatever it raises ends the link.
        on_written: Told after each write that the peer took something.
    """

    def __init__(
        self,
        out: type[Out],
        limits: LinkLimits,
        on_frame: Callable[[In], None],
        on_written: Callable[[], None] = lambda: None,
    ) -> None:
        self._out = out
        self._limits = limits
        self._on_frame = on_frame
        self._on_written = on_written
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._ended: asyncio.Future[MeshError] = self._loop.create_future()
        self._watch: asyncio.TimerHandle | None = None
        self._watch_due = 0.0
        self._pieces = Reassembler(limits.max_incomplete_bytes)
        self.outbox = Outbox(
            max_frame_bytes=limits.max_frame_bytes,
            fragment=lambda number, data, last: fragment(out, number, data, last),
        )
        self.sent_at = self.received_at = self._loop.time()

    @property
    def ended(self) -> bool:
        """Whether the link is over; nothing that is pushed now will leave."""
        return self._ended.done()

    def push(self, data: bytes, lane: Lane, *, tag: int | None = None) -> None:
        """Queue a serialized frame. The caller minds the bounds."""
        self.outbox.push(data, lane, tag=tag)
        self._wake.set()

    def end(self, error: MeshError) -> None:
        """End the link; the first reason stays."""
        if not self._ended.done():
            self._ended.set_result(error)

    async def run(
        self, read: Callable[[], Awaitable[Any]], write: Callable[[Out], Awaitable[None]]
    ) -> MeshError:
        """Pump until the link ends; return why.

        Args:
            read: Returns the next frame, or `grpc.aio.EOF`.
            write: Returns when the peer's window took the frame.
        """
        self.sent_at = self.received_at = self._loop.time()
        self._schedule_watch()
        try:
            async with asyncio.TaskGroup() as tasks:
                children = (
                    tasks.create_task(self._read(read)),
                    tasks.create_task(self._write(write)),
                )
                try:
                    return await asyncio.shield(self._ended)
                finally:
                    for child in children:
                        child.cancel()
        finally:
            if self._watch:
                self._watch.cancel()
            self.outbox.clear()

    def deliver(self, frame: In) -> None:
        """Take one frame from the peer: rejoin fragments, hand over whole frames."""
        self.received_at = self._loop.time()
        try:
            # Fragments travel alone, so their frames' order is the order of the stream.
            for piece in frame.link.fragments:
                whole = self._pieces.add(piece.fragment_id, piece.data, last=piece.last)
                if whole is not None:
                    self._on_frame(_parsed(type(frame), whole))
            self._on_frame(frame)
        except MeshError as error:
            self.end(error)
        except ValueError as error:  # bounds of the reassembler, pieces that make no frame
            self.end(InvalidRequest(str(error)))
        except Exception as error:  # noqa: BLE001 - logged by conceal; ends this link only
            self.end(conceal(error, "handling a frame"))

    async def _read(self, read: Callable[[], Awaitable[Any]]) -> None:
        try:
            while (frame := await read()) is not grpc.aio.EOF:
                if self.ended:
                    return
                if frame.link.HasField("hello"):
                    self.end(InvalidRequest("a link has one hello"))
                    return
                self.deliver(frame)
            self.end(LinkLost("the peer closed the link"))
        except Exception as error:  # noqa: BLE001 - each ends in `end`
            self.end(lost(error))

    async def _write(self, write: Callable[[Out], Awaitable[None]]) -> None:
        try:
            while True:
                data = self.outbox.next_frame()
                if data is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await write(self._out.FromString(data))
                self.sent_at = self._loop.time()
                self._on_written()
        except asyncio.InvalidStateError:
            return  # the call is over; the reader gets its status
        except Exception as error:  # noqa: BLE001 - each ends in `end`
            self.end(lost(error))

    def _schedule_watch(self) -> None:
        limits = self._limits
        self._watch_due = min(
            self.sent_at + limits.heartbeat_s, self.received_at + limits.peer_timeout_s
        )
        # A write that hangs leaves sent_at behind; don't spin on it.
        self._watch_due = max(self._watch_due, self._loop.time() + limits.heartbeat_s / 4)
        self._watch = self._loop.call_at(self._watch_due, self._look)

    def _look(self) -> None:
        """Ping when this side was silent; end the link when the peer was."""
        limits = self._limits
        now = self._loop.time()
        late = now - self._watch_due
        if late > limits.heartbeat_s:
            # This process stood still; frames of the peer may wait unread.
            self.received_at += late
        if now - self.received_at >= limits.peer_timeout_s:
            self.end(LinkLost(f"the peer was silent for {now - self.received_at:.1f} s"))
            return
        if now - self.sent_at >= limits.heartbeat_s and not self.outbox.work_bytes:
            self.push(ping(self._out), Lane.CONTROL)
        self._schedule_watch()


def _parsed(kind: type[In], data: bytes) -> In:
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ValueError("fragments do not make a frame") from None


def lost(error: Exception) -> MeshError:
    """Return why a stream ended: a refusal as it is, all else as LinkLost."""
    if isinstance(error, grpc.RpcError):
        cause = from_rpc_error(error)
        if isinstance(cause, (InvalidRequest, NotSupported)):
            return cause
        return LinkLost(f"{cause.reason}: {cause.message}")
    logger.warning("link stream failed", exc_info=error)
    return LinkLost(f"the stream failed: {type(error).__name__}")
