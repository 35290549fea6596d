"""What a link sends: priority lanes, joining, fragments. Knows bytes; no wire, loop or clock.

Serialized frames of one stream may be joined by concatenation (link.proto), so
the outbox joins what waits until a frame is full. Within a lane order is kept; a
lower lane waits for all higher ones. An item larger than a frame leaves as
fragments, each alone in its frame, so that an item is complete exactly when its
turn has come and higher lanes get in between.
"""

import enum
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Lane", "Outbox", "Reassembler"]

# What a queued item costs besides its bytes; keeps many tiny ones bounded, too.
ITEM_OVERHEAD_BYTES = 64
# More than a Fragment's own fields and tags need.
FRAGMENT_HEADER_BYTES = 64


class Lane(enum.IntEnum):
    """Priority of a frame; lower goes first."""

    CONTROL = 0
    WORK = 1
    FEED = 2


@dataclass(slots=True, eq=False)
class _Item:
    data: bytes
    lane: Lane
    tag: int | None
    fragment_id: int = 0
    offset: int = 0  # bytes that left as fragments

    @property
    def cost(self) -> int:
        return len(self.data) - self.offset + ITEM_OVERHEAD_BYTES


@dataclass(slots=True)
class _Tag:
    queued: dict[int, _Item] = field(default_factory=dict)
    seen: bool = False  # some of it left


class Outbox:
    """Queues serialized frames and hands them out as frames of bounded size.

    Args:
        max_frame_bytes: No frame is larger.
        fragment: Serializes `(fragment_id, data, last)` as a frame.
    """

    def __init__(
        self, *, max_frame_bytes: int, fragment: Callable[[int, bytes, bool], bytes]
    ) -> None:
        if max_frame_bytes <= FRAGMENT_HEADER_BYTES:
            raise ValueError(f"max_frame_bytes must exceed {FRAGMENT_HEADER_BYTES}")
        self._max = max_frame_bytes
        self._fragment = fragment
        self._lanes: tuple[OrderedDict[int, _Item], ...] = tuple(OrderedDict() for _ in Lane)
        self._bytes = [0] * len(Lane)
        self._untagged = [0] * len(Lane)
        self._tags: dict[int, _Tag] = {}
        self._numbers = 0

    @property
    def work_bytes(self) -> int:
        """Bytes waiting in CONTROL and WORK, a fixed cost per item included."""
        return self._bytes[Lane.CONTROL] + self._bytes[Lane.WORK]

    @property
    def feed_bytes(self) -> int:
        """Bytes waiting in FEED, a fixed cost per item included."""
        return self._bytes[Lane.FEED]

    def push(self, data: bytes, lane: Lane, *, tag: int | None = None) -> None:
        """Queue one serialized frame; `tag` names the entry it belongs to, if one."""
        self._numbers += 1
        item = _Item(data, lane, tag, self._numbers)
        self._lanes[lane][self._numbers] = item
        self._bytes[lane] += item.cost
        if tag is None:
            self._untagged[lane] += 1
        else:
            self._tags.setdefault(tag, _Tag()).queued[self._numbers] = item

    def next_frame(self) -> bytes | None:
        """Take the next frame to write, or None when nothing waits."""
        parts: list[bytes] = []
        room = self._max
        for lane in self._lanes:
            while lane:
                item = next(iter(lane.values()))
                size = len(item.data)
                if size > self._max and not parts:
                    return self._next_piece(item)
                if size > room:
                    return b"".join(parts)
                parts.append(item.data)
                room -= size
                self._remove(item)
        return b"".join(parts) if parts else None

    def _next_piece(self, item: _Item) -> bytes:
        start = item.offset
        end = min(start + self._max - FRAGMENT_HEADER_BYTES, len(item.data))
        last = end == len(item.data)
        if last:
            self._remove(item)
        else:
            item.offset = end
            self._bytes[item.lane] -= end - start
            self._mark_seen(item)
        return self._fragment(item.fragment_id, item.data[start:end], last)

    def _mark_seen(self, item: _Item) -> None:
        if item.tag is not None:
            self._tags[item.tag].seen = True

    def _remove(self, item: _Item) -> None:
        del self._lanes[item.lane][item.fragment_id]
        self._bytes[item.lane] -= item.cost
        if item.tag is None:
            self._untagged[item.lane] -= 1
            return
        tag = self._tags[item.tag]
        tag.seen = True
        del tag.queued[item.fragment_id]

    def withdraw(self, tag: int) -> Lane | None:
        """Drop what is unsent of an entry and forget it.

        Returns:
            The lane at whose end word of the withdrawal is sure to come after
            everything of the entry that was or will be sent: the rest of an item
            that left in part, and items without a tag. None when everything of
            the entry was still here, so the peer need not be told.
        """
        known = self._tags.pop(tag, None)
        for item in known.queued.values() if known else ():
            if item.offset:
                item.tag = None
                self._untagged[item.lane] += 1
            else:
                del self._lanes[item.lane][item.fragment_id]
                self._bytes[item.lane] -= item.cost
        if known and not known.seen and known.queued:
            return None
        return max((lane for lane in Lane if self._untagged[lane]), default=Lane.CONTROL)

    def drop_feed(self) -> int:
        """Drop queued FEED items, but not the rest of one that left in part.

        Returns:
            How many were dropped.
        """
        dropped = 0
        for item in list(self._lanes[Lane.FEED].values()):
            if not item.offset:
                self._remove(item)
                dropped += 1
        return dropped

    def clear(self) -> None:
        """Forget everything: the stream is gone."""
        for lane in self._lanes:
            lane.clear()
        self._tags.clear()
        self._bytes = [0] * len(Lane)
        self._untagged = [0] * len(Lane)


class Reassembler:
    """Joins fragments to whole frames, bounded.

    Args:
        max_bytes: Bytes of incomplete frames that it holds at most.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._bytes = 0
        self._pieces: dict[int, list[bytes]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of incomplete frames, a fixed cost per piece included."""
        return self._bytes

    def add(self, fragment_id: int, data: bytes, *, last: bool) -> bytes | None:
        """Take a piece; return the whole frame when it was the last one.

        Raises:
            ValueError: The bound is passed.
        """
        pieces = self._pieces.setdefault(fragment_id, [])
        pieces.append(data)
        self._bytes += len(data) + ITEM_OVERHEAD_BYTES
        if self._bytes > self._max:
            raise ValueError(f"incomplete frames exceed {self._max} bytes")
        if not last:
            return None
        del self._pieces[fragment_id]
        self._bytes -= sum(map(len, pieces)) + ITEM_OVERHEAD_BYTES * len(pieces)
        return b"".join(pieces)
