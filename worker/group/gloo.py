"""The `gloo` carrier: records and marks through a torch process group, across hosts too.

A record goes to every other rank as one message of fixed size that begins with its
length and carries a small record whole; a larger one follows in a second message. The
receivers stand ready for as many records as may be under way, so that a send never
waits for a rank that computes. All is sent from rank to rank and not down a tree: which
rank fails is known, and nobody's delay is another one's.

A rank that waits for a record waits without a deadline and without using the CPU.
"""

import struct
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from worker.config import RankConfig
from worker.group.framing import MAX_BODY_BYTES, FramingError
from worker.parallel.world import world
from worker.peers import PeerGone, PeerLost

SLOT_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<Q")
_MARK: Final = struct.Struct("<Q")
_INLINE_BYTES: Final = SLOT_BYTES - _LENGTH.size
# Messages of one kind between two ranks arrive in order.
_RECORD, _REST, _ANSWER, _ANSWER_REST, _MARKS = range(1, 6)


class GlooRoot:
    """Rank (0, 0)'s end."""

    def __init__(self, config: RankConfig) -> None:
        """Meet the other ranks.

        Raises:
            PeerLost: They did not come.
        """
        found = world(config)
        self._group = found.control
        self._others = range(1, found.size)
        self._deadline_s = config.peer_timeout_s
        self._answers = {
            rank: _Inbox(self._group, rank, _ANSWER, SLOT_BYTES, 1) for rank in self._others
        }
        self._marks = {
            rank: _Inbox(self._group, rank, _MARKS, _MARK.size, config.depth)
            for rank in self._others
        }
        self._outbox = _Outbox(self._group, config.depth, config.peer_timeout_s)

    def __repr__(self) -> str:
        return f"<GlooRoot of {len(self._others)} ranks>"

    def hellos(self) -> list[bytes]:
        """Wait for every other rank's next word."""
        return [_whole(self._group, inbox, _ANSWER_REST) for inbox in self._answers.values()]

    def broadcast(self, record: bytes) -> None:
        """Send the record to every other rank."""
        self._outbox.send(record, self._others, _RECORD, _REST)

    def marks(self, ranks: Sequence[int], timeout_s: float | None = None) -> list[int]:
        """Wait for the next unread mark of each of these ranks."""
        until = time.monotonic() + (self._deadline_s if timeout_s is None else timeout_s)
        return [
            _MARK.unpack(self._marks[rank].take(max(0.001, until - time.monotonic())))[0]
            for rank in ranks
        ]

    def close(self) -> None:
        """The end of the process is what the others notice."""


class GlooLeaf:
    """Any other rank's end."""

    def __init__(self, config: RankConfig) -> None:
        """Meet the other ranks.

        Raises:
            PeerLost: They did not come.
        """
        self._group = world(config).control
        self._records = _Inbox(self._group, 0, _RECORD, SLOT_BYTES, config.depth)
        self._words = _Outbox(self._group, 1, None)
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._depth = config.depth

    def __repr__(self) -> str:
        return "<GlooLeaf>"

    def hello(self, word: bytes) -> None:
        """Say a word."""
        self._words.send(word, [0], _ANSWER, _ANSWER_REST)

    def receive(self) -> bytes:
        """Wait, for ever, for the next record."""
        return _whole(self._group, self._records, _REST)

    def mark(self, value: int) -> None:
        """Answer the last record with 64 bits."""
        tensor = _tensor(bytearray(_MARK.pack(value)))
        self._sent.append((_send(self._group, tensor, 0, _MARKS), tensor))
        if len(self._sent) > self._depth:
            # Rank (0, 0) has read it: it would not have sent the last record otherwise.
            _wait(self._sent.popleft()[0], 0, None)

    def close(self) -> None:
        """The end of the process is what rank (0, 0) notices."""


class _Inbox:
    """Messages of one size and kind from one rank; `depth` of them may come unasked."""

    def __init__(self, group: Any, rank: int, kind: int, size: int, depth: int) -> None:
        self.rank = rank
        self._group = group
        self._kind = kind
        self._slots: deque[tuple[bytearray, Any]] = deque()
        for _ in range(depth):
            self._stand_ready(bytearray(size))

    def take(self, timeout_s: float | None = None) -> bytes:
        """Wait for the next one."""
        buffer, work = self._slots[0]
        _wait(work, self.rank, timeout_s)
        self._slots.popleft()
        message = bytes(buffer)
        self._stand_ready(buffer)
        return message

    def _stand_ready(self, buffer: bytearray) -> None:
        self._slots.append((buffer, _receive(self._group, buffer, self.rank, self._kind)))


class _Outbox:
    """Sends records; waits only for those that `depth` later ones have followed."""

    def __init__(self, group: Any, depth: int, deadline_s: float | None) -> None:
        self._group = group
        self._depth = depth
        self._deadline_s = deadline_s
        self._sent: deque[list[tuple[int, Any, Tensor]]] = deque()

    def send(self, record: bytes, ranks: Sequence[int], kind: int, rest: int) -> None:
        if len(record) > MAX_BODY_BYTES:
            raise FramingError(f"a record of {len(record)} bytes exceeds {MAX_BODY_BYTES}")
        slot = bytearray(SLOT_BYTES)
        _LENGTH.pack_into(slot, 0, len(record))
        parts = [(kind, _tensor(slot))]
        if len(record) <= _INLINE_BYTES:
            slot[_LENGTH.size : _LENGTH.size + len(record)] = record
        else:
            parts.append((rest, _tensor(bytearray(record))))
        self._sent.append(
            [
                (rank, _send(self._group, tensor, rank, kind), tensor)
                for kind, tensor in parts
                for rank in ranks
            ]
        )
        if len(self._sent) > self._depth:
            for rank, work, _ in self._sent.popleft():
                _wait(work, rank, self._deadline_s)


def _whole(group: Any, inbox: _Inbox, rest: int) -> bytes:
    """Wait for a record and, where it is large, for its second message."""
    slot = inbox.take()
    (size,) = _LENGTH.unpack_from(slot)
    if size <= _INLINE_BYTES:
        return slot[_LENGTH.size : _LENGTH.size + size]
    if size > MAX_BODY_BYTES:
        raise FramingError(f"rank {inbox.rank} announces {size} bytes")
    body = bytearray(size)
    _wait(_receive(group, body, inbox.rank, rest), inbox.rank, None)
    return bytes(body)


def _tensor(buffer: bytearray) -> Tensor:
    """Return a tensor [bytes], uint8, on the buffer's own memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _send(group: Any, tensor: Tensor, rank: int, kind: int) -> Any:
    try:
        return group.send([tensor], rank, kind)
    except RuntimeError as error:
        raise PeerGone(f"rank {rank} is gone") from error


def _receive(group: Any, buffer: bytearray, rank: int, kind: int) -> Any:
    try:
        return group.recv([_tensor(buffer)], rank, kind)
    except RuntimeError:
        return None  # told by `_wait`: what came before the end is still read


def _wait(work: Any, rank: int, timeout_s: float | None) -> None:
    began = time.monotonic()
    if work is None:
        raise PeerGone(f"rank {rank} is gone")
    try:
        if timeout_s is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        if timeout_s is not None and time.monotonic() - began >= timeout_s:
            raise PeerLost(f"rank {rank} gave no answer in time") from error
        raise PeerGone(f"rank {rank} is gone") from error
