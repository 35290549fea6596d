"""The router's end of links. Knows dialling, entries, deadlines; not what entries are about.

A link is one bidirectional stream that carries many requests; link.proto has the
rules. This module is the front door of the package's links, so the service's end
(serve.py, session.py) and what both share (frames.py, lanes.py) can be imported from here.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

from radixmesh.errors import (
    DeadlineExceeded,
    InvalidRequest,
    LinkLost,
    LinkOverloaded,
    MeshError,
    NotSupported,
)
from radixmesh.rpc.dial import Attach, Dialled, dial
from radixmesh.rpc.frames import DEFAULT_LIMITS, Frame, Identity, LinkLimits, Peer, hello
from radixmesh.rpc.lanes import Lane
from radixmesh.rpc.pump import Pump
from radixmesh.rpc.serve import serve_link
from radixmesh.rpc.session import Handler, Session
from radixmesh.rpc.status import conceal, from_failure
from radixmesh.waits import Backoff

__all__ = [
    "Handler",
    "Identity",
    "Lane",
    "Link",
    "LinkLimits",
    "Listener",
    "Peer",
    "Session",
    "Sink",
    "serve_link",
]

logger = logging.getLogger(__name__)

# Failed dials, some seconds, until a peer that was never up is worth a warning.
_DIALS_BEFORE_ALARM = 6

Down = TypeVar("Down", bound=Frame)
Up = TypeVar("Up", bound=Frame)
UpContra = TypeVar("UpContra", bound=Frame, contravariant=True)


class Sink(Protocol):
    """What waits for an entry's items. Services add methods of their own."""

    def on_failed(self, error: MeshError, /) -> None:
        """The entry ended by an error. At most once; the entry is closed already."""


S = TypeVar("S", bound=Sink)


class Listener(Protocol[UpContra]):
    """What a link tells its owner. Called on the loop, quick; what it raises ends the link."""

    def on_up(self, peer: Peer, /, *, is_new: bool) -> None:
        """The peer said hello; `is_new`: another instance than last time, or the first."""

    def on_frame(self, frame: UpContra, /) -> None:
        """Take a frame. Its failures are handled after this returns."""

    def on_down(self, error: MeshError, /) -> None:
        """The link is lost; every open entry got LinkLost just before."""


class Link(Generic[Down, Up, S]):
    """A link that is dialled again for ever.

    Args:
        address: `host:port`.
        attach: Returns the stub's `Attach` on a channel.
        down: The class of the frames to the service.
        listener: Told of frames and of the link's state.
        identity: This process.
        limits: Bounds and intervals.
        rng: Jitter of the back-off.

    Attributes:
        peer: Who answered last, or None before the first hello.
        entries: The open entries' sinks, by number; a live view.
    """

    def __init__(  # noqa: PLR0913 - what it takes is what a link is
        self,
        address: str,
        *,
        attach: Attach[Down, Up],
        down: type[Down],
        listener: Listener[Up],
        identity: Identity,
        limits: LinkLimits = DEFAULT_LIMITS,
        rng: random.Random | None = None,
    ) -> None:
        self.address = address
        self.peer: Peer | None = None
        self._attach = attach
        self._down = down
        self._listener = listener
        self._identity = identity
        self._limits = limits
        self._backoff = Backoff(
            limits.backoff_initial_s, limits.backoff_max_s, rng or random.Random()
        )
        self._pump: Pump[Down, Up] | None = None
        self._entries: dict[int, S] = {}
        self.entries: Mapping[int, S] = MappingProxyType(self._entries)
        self._deadlines: dict[int, asyncio.TimerHandle] = {}
        self._last_entry = 0
        self._up_at: float | None = None

    def __repr__(self) -> str:
        state = "up" if self.connected else "down"
        return f"Link({self.address}, {state}, entries={len(self._entries)})"

    @property
    def connected(self) -> bool:
        """Whether hellos were exchanged and the link is not known to be lost."""
        return self._pump is not None and not self._pump.ended

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes."""
        return self._pump.outbox.work_bytes if self._pump else 0

    def open(self, sink: S, *, timeout_s: float | None = None) -> int:
        """Begin an entry; return its number, which rises and is never used again.

        Args:
            sink: Told when the entry fails.
            timeout_s: Afterwards the entry is cancelled and fails as DeadlineExceeded.

        Raises:
            LinkLost: The link is down.
        """
        self._up_or_raise()
        self._last_entry += 1
        entry_id = self._last_entry
        self._entries[entry_id] = sink
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            self._deadlines[entry_id] = loop.call_later(timeout_s, self._expire, entry_id)
        return entry_id

    def send(self, frame: Down, lane: Lane, *, entry_id: int | None = None) -> None:
        """Queue a frame; never blocks.

        Args:
            frame: What to send. All frames of one entry MUST use one lane.
            lane: Its priority.
            entry_id: The entry it belongs to, if it is one's alone. While unsent it
                leaves with the entry; for an entry that is not open nothing is sent.

        Raises:
            LinkLost: The link is down.
            LinkOverloaded: The outgoing buffer is full.
            InvalidRequest: The frame is larger than a link carries.
        """
        pump = self._up_or_raise()
        if entry_id is not None and entry_id not in self._entries:
            return
        data = frame.SerializeToString()
        limits = self._limits
        if len(data) > limits.max_item_bytes:
            raise InvalidRequest("the request is too large", limit=limits.max_item_bytes)
        if pump.outbox.work_bytes + len(data) > limits.max_pending_bytes:
            raise LinkOverloaded(f"the link to {self.address} is full")
        pump.push(data, lane, tag=entry_id)

    def close(self, entry_id: int) -> S | None:
        """Forget an entry whose terminal item came; return its sink, if it was open."""
        sink = self._take(entry_id)
        if sink is not None and self._pump:
            self._pump.outbox.withdraw(entry_id)
        return sink

    def cancel(self, entry_id: int) -> None:
        """Forget an entry and tell the peer. Never overtakes the entry's own frames; idempotent."""
        if self._take(entry_id) is None or self._pump is None or self._pump.ended:
            return
        lane = self._pump.outbox.withdraw(entry_id)
        if lane is None:
            return
        if self._pump.outbox.work_bytes > self._limits.max_pending_bytes:
            self._pump.end(LinkOverloaded("no room for a cancel"))
            return
        frame = self._down()
        frame.link.cancels.append(entry_id)
        self._pump.push(frame.SerializeToString(), lane)

    async def run(self) -> None:
        """Dial, serve, and dial again, until cancelled. Its owner runs it in a TaskGroup."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            self._up_at = None
            error = await self._serve_once()
            if self._up_at is not None:
                failures = 0
                if loop.time() - self._up_at > self._limits.heartbeat_s:
                    self._backoff.reset()
            delay_s = self._backoff.next_s()
            self._log_down(error, failures, delay_s)
            failures += 1
            await asyncio.sleep(delay_s)

    def _log_down(self, error: MeshError, failures: int, delay_s: float) -> None:
        """Once loudly; a peer that stays away does not fill the log. A refusal always does.

        A peer that was never up may be starting: that is an alarm after a few dials only.
        """
        alarm_at = 0 if self.peer is not None else _DIALS_BEFORE_ALARM
        if isinstance(error, (NotSupported, InvalidRequest)):
            level = logging.ERROR
        elif failures == alarm_at:
            level = logging.WARNING
        else:
            level = logging.DEBUG if failures else logging.INFO
        logger.log(
            level,
            "link down",
            extra={"address": self.address, "error": error.message, "retry_s": round(delay_s, 3)},
        )

    async def _serve_once(self) -> MeshError:
        greeting = hello(self._down, self._identity, self._limits)
        timeout_s = self._limits.connect_timeout_s
        try:
            async with dial(self.address, self._attach, greeting, timeout_s=timeout_s) as dialled:
                return await self._serve(dialled)
        except MeshError as error:
            return error
        except Exception as fault:  # noqa: BLE001 - logged by conceal; ends this dial only
            return conceal(fault, "dialling")

    async def _serve(self, dialled: Dialled[Down, Up]) -> MeshError:
        pump: Pump[Down, Up] = Pump(self._down, self._limits, self._receive)
        peer = dialled.peer
        is_new = self.peer is None or self.peer.instance_id != peer.instance_id
        self.peer, self._pump = peer, pump
        self._up_at = asyncio.get_running_loop().time()
        logger.info(
            "link up",
            extra={"address": self.address, "peer": peer.name, "instance": peer.instance_id},
        )
        error: MeshError = LinkLost("the link was closed")
        try:
            self._call_out(lambda: self._listener.on_up(peer, is_new=is_new))
            if not pump.ended:
                pump.deliver(dialled.first)
            error = await pump.run(dialled.call.read, dialled.call.write)
            return error
        finally:
            pump.end(error)
            self._lose(error)

    def _lose(self, error: MeshError) -> None:
        self._pump = None
        for entry_id in list(self._entries):
            sink = self._take(entry_id)
            if sink is not None:
                loss = LinkLost(f"the link to {self.address} is lost: {error.message}")
                self._fail(sink, loss)
        self._call_out(lambda: self._listener.on_down(error))

    def _receive(self, frame: Up) -> None:
        self._listener.on_frame(frame)
        # After the content: a frame may carry an entry's last items and its failure.
        for failure in frame.link.failures:
            sink = self.close(failure.entry_id)
            if sink is not None:
                self._fail(sink, from_failure(failure))

    def _expire(self, entry_id: int) -> None:
        sink = self._entries.get(entry_id)
        if sink is None:
            return
        self.cancel(entry_id)
        self._fail(sink, DeadlineExceeded("the deadline passed"))

    def _take(self, entry_id: int) -> S | None:
        deadline = self._deadlines.pop(entry_id, None)
        if deadline:
            deadline.cancel()
        return self._entries.pop(entry_id, None)

    def _fail(self, sink: S, error: MeshError) -> None:
        self._call_out(lambda: sink.on_failed(error))

    def _call_out(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as fault:  # noqa: BLE001 - logged by conceal; ends this link only
            hidden = conceal(fault, "in a link's callback")
            if self._pump:
                self._pump.end(hidden)

    def _up_or_raise(self) -> Pump[Down, Up]:
        if self._pump is None or self._pump.ended:
            raise LinkLost(f"the link to {self.address} is down")
        return self._pump
