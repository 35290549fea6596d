"""The `local` carrier: one unix stream socket between rank (0, 0) and each other rank.

Records go down as frames, marks come back as 8 bytes each. A rank that waits for
a record waits without a deadline and without using the CPU; every answer has one.
A record that does not fit into the socket waits for its rank. One of rank (0, 0)'s own
stage reads at once; one of a later stage may compute a step before it reads.
"""

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final

from worker.group.framing import HEADER, MAX_BODY_BYTES, FramingError, frame
from worker.peers import PeerGone, PeerLost

ANSWER_DEADLINE_S: Final = 4.0
STEP_DEADLINE_S: Final = 60.0
_MARK: Final = struct.Struct("<Q")


class LocalRoot:
    """Rank (0, 0)'s end."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        *,
        stage_size: int = 1,
        deadline_s: float = ANSWER_DEADLINE_S,
        step_deadline_s: float = STEP_DEADLINE_S,
    ) -> None:
        """Take the sockets.

        Args:
            sockets: By the number of the rank behind them, from 1.
            stage_size: Ranks below this number are of rank (0, 0)'s own stage.
            deadline_s: For a mark, and until one of those has read a record.
            step_deadline_s: Until any other rank has read one.
        """
        self._sockets = list(sockets)
        self._stage_size = stage_size
        self._deadline_s = deadline_s
        self._step_deadline_s = step_deadline_s

    def __repr__(self) -> str:
        return f"<LocalRoot of {len(self._sockets)} ranks>"

    def hellos(self) -> list[bytes]:
        """Wait for every other rank's next word."""
        words = []
        for number, peer in enumerate(self._sockets, 1):
            peer.settimeout(None)
            words.append(_receive_frame(peer, f"rank {number}"))
        return words

    def broadcast(self, record: bytes) -> None:
        """Send the record to every other rank."""
        if not self._sockets:
            return
        framed = frame(record)
        for number, peer in enumerate(self._sockets, 1):
            near = number < self._stage_size
            peer.settimeout(self._deadline_s if near else self._step_deadline_s)
            _send(peer, framed, f"rank {number}")

    def marks(self, ranks: Sequence[int], timeout_s: float | None = None) -> list[int]:
        """Wait for the next unread mark of each of these ranks; the others' stay buffered."""
        values = []
        until = time.monotonic() + (self._deadline_s if timeout_s is None else timeout_s)
        for number in ranks:
            peer = self._sockets[number - 1]
            peer.settimeout(max(0.001, until - time.monotonic()))
            raw = _receive(peer, _MARK.size, f"rank {number}")
            values.append(_MARK.unpack(raw)[0])
        return values

    def close(self) -> None:
        """Let go of all."""
        for peer in self._sockets:
            peer.close()


class LocalLeaf:
    """Any other rank's end."""

    def __init__(self, root: socket.socket) -> None:
        root.settimeout(None)
        self._root = root

    def __repr__(self) -> str:
        return "<LocalLeaf>"

    def hello(self, word: bytes) -> None:
        """Say a word."""
        _send(self._root, frame(word), "rank 0")

    def receive(self) -> bytes:
        """Wait, for ever, for the next record."""
        return _receive_frame(self._root, "rank 0")

    def mark(self, value: int) -> None:
        """Answer the last record with 64 bits."""
        _send(self._root, _MARK.pack(value), "rank 0")

    def close(self) -> None:
        """Let go."""
        self._root.close()


def _send(peer: socket.socket, data: bytes, name: str) -> None:
    try:
        peer.sendall(data)
    except TimeoutError as error:
        raise PeerLost(f"{name} takes no more records") from error
    except OSError as error:
        raise PeerGone(f"{name} is gone") from error


def _receive_frame(peer: socket.socket, name: str) -> bytes:
    (size,) = HEADER.unpack(_receive(peer, HEADER.size, name))
    if size > MAX_BODY_BYTES:
        raise FramingError(f"{name} announces {size} bytes")
    return _receive(peer, size, name)


def _receive(peer: socket.socket, size: int, name: str) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            part = peer.recv(size - len(parts))
        except TimeoutError as error:
            raise PeerLost(f"{name} gave no answer in time") from error
        except OSError as error:
            raise PeerGone(f"{name} is gone") from error
        if not part:
            raise PeerGone(f"{name} is gone")
        parts += part
    return bytes(parts)
