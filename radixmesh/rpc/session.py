"""The service's end of a link. Knows frames, entries and cancels; not what entries are about."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from radixmesh.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LinkOverloaded,
    MeshError,
)
from radixmesh.rpc.frames import Frame, LinkLimits, Peer
from radixmesh.rpc.lanes import Lane
from radixmesh.rpc.pump import Pump
from radixmesh.rpc.status import conceal, to_failure

__all__ = ["Handler", "Session"]

logger = logging.getLogger(__name__)

Up = TypeVar("Up", bound=Frame)
Down = TypeVar("Down", bound=Frame)
DownContra = TypeVar("DownContra", bound=Frame, contravariant=True)

OnCancel = Callable[[MeshError], None]


class Handler(Protocol[DownContra]):
    """A service's side of a session. Called on the loop, quick; what it raises ends the link."""

    def on_frame(self, frame: DownContra, /) -> None:
        """Take a frame. Its cancels are handled after this returns."""

    def on_closed(self, error: MeshError, /) -> None:
        """The link is over; every open entry was told just before."""

    def on_feed_dropped(self) -> None:
        """Queued feed was dropped for a slow reader, who reads again now: begin anew."""


@dataclass(slots=True)
class _Open:
    on_cancel: OnCancel
    deadline: asyncio.TimerHandle | None


class Session(Generic[Up]):
    """One router's link, as the service sees it."""

    def __init__(self, peer: Peer, pump: Pump[Up, Any], up: type[Up], limits: LinkLimits) -> None:
        self.peer = peer
        self._pump = pump
        self._up = up
        self._limits = limits
        self._entries: dict[int, _Open] = {}
        self._feed_dropped = False
        self._closed = False
        self._loop = asyncio.get_running_loop()

    def __repr__(self) -> str:
        return f"Session({self.peer.name}, entries={len(self._entries)}, closed={self.closed})"

    @property
    def closed(self) -> bool:
        """Whether the link is over."""
        return self._closed or self._pump.ended

    @property
    def entry_count(self) -> int:
        """Entries that are open."""
        return len(self._entries)

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes of CONTROL and WORK."""
        return self._pump.outbox.work_bytes

    @property
    def feed_bytes(self) -> int:
        """Unsent bytes of FEED."""
        return self._pump.outbox.feed_bytes

    def send(self, frame: Up, lane: Lane) -> None:
        """Queue a frame; never blocks. Nothing happens when the link is over.

        A reader too slow for CONTROL and WORK loses the link. One too slow for the
        feed loses what is queued of it and all that follows until it reads again;
        then `Handler.on_feed_dropped` is called.
        """
        if self.closed:
            return
        data = frame.SerializeToString()
        if len(data) > self._limits.max_item_bytes:
            self.end(InvalidRequest(f"an item of {len(data)} bytes is more than a link carries"))
        elif lane is Lane.FEED:
            self._send_feed(data)
        elif self.pending_bytes + len(data) > self._limits.max_pending_bytes:
            self.end(LinkOverloaded(f"{self.pending_bytes} bytes wait for a reader too slow"))
        else:
            self._pump.push(data, lane)

    def _send_feed(self, data: bytes) -> None:
        if self._feed_dropped:
            return
        if self.feed_bytes + len(data) <= self._limits.max_feed_bytes:
            self._pump.push(data, Lane.FEED)
            return
        self._feed_dropped = True
        count = self._pump.outbox.drop_feed()
        logger.warning("feed dropped", extra={"peer": self.peer.name, "items": count})

    def open(self, entry_id: int, on_cancel: OnCancel, *, remaining_ms: int = 0) -> bool:
        """Begin an entry. False when the number is in use: the first one goes on unharmed.

        Args:
            entry_id: The router's number.
            on_cancel: Called at most once: the router's cancel (Cancelled), the
                deadline (DeadlineExceeded), the link's end (LinkLost).
            remaining_ms: Time left until its deadline; 0 means none.
        """
        if entry_id in self._entries:
            logger.warning("duplicate entry", extra={"peer": self.peer.name, "entry": entry_id})
            return False
        deadline = None
        if remaining_ms:
            deadline = self._loop.call_later(remaining_ms / 1000, self._expire, entry_id)
        self._entries[entry_id] = _Open(on_cancel, deadline)
        return True

    def close(self, entry_id: int) -> bool:
        """Forget an entry: its terminal item was sent. False when it was not open."""
        return self._take(entry_id) is not None

    def fail(self, entry_id: int, error: MeshError) -> None:
        """End an entry, open or never opened, by a typed error."""
        self._take(entry_id)
        frame = self._up()
        frame.link.failures.append(to_failure(entry_id, error))
        self.send(frame, Lane.CONTROL)

    def end(self, error: MeshError) -> None:
        """End the whole link; the router sees the error as the status of its stream."""
        self._pump.end(error)

    def _take(self, entry_id: int) -> OnCancel | None:
        entry = self._entries.pop(entry_id, None)
        if entry is None:
            return None
        if entry.deadline:
            entry.deadline.cancel()
        return entry.on_cancel

    def _expire(self, entry_id: int) -> None:
        on_cancel = self._take(entry_id)
        if on_cancel is None:
            return
        error = DeadlineExceeded("the deadline passed")
        self.fail(entry_id, error)
        self._tell(on_cancel, error)

    def _tell(self, on_cancel: OnCancel, error: MeshError) -> None:
        try:
            on_cancel(error)
        except Exception as fault:  # noqa: BLE001 - logged by conceal
            self.end(conceal(fault, "cancelling an entry"))

    # What follows is called by serve_link alone.

    def take_cancels(self, frame: Frame) -> None:
        """End the entries that a frame cancels, after its content was handled."""
        for entry_id in frame.link.cancels:
            on_cancel = self._take(entry_id)
            if on_cancel:
                self._tell(on_cancel, Cancelled("the router cancelled"))

    def take_feed_drop(self) -> bool:
        """Return once whether feed was dropped; from now on it is taken again."""
        dropped, self._feed_dropped = self._feed_dropped, False
        return dropped

    def lose(self, error: MeshError) -> None:
        """End every entry: the link is over."""
        self._closed = True
        for entry_id in list(self._entries):
            on_cancel = self._take(entry_id)
            if on_cancel:
                self._tell(on_cancel, error)
