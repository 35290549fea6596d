"""The memory that the tp ranks of a stage share: how it is made, and stopped from outside.

The front makes one segment for each stage of each replica's incarnation and hands its
descriptor down. It has no name, so none can be stale, and it ends with its last user.
Knows nothing of torch. `shm.cpp` holds the same layout; `LAYOUT` tells them apart.

    bytes 0..63     layout, ranks, bytes of a buffer, the word that stops all, who is ready
    bytes 1024..    for each rank: its last call, and who sleeps for it
    bytes 32768..   for each rank: two buffers
"""

import mmap
import os
import struct
import sys
import time
from enum import IntEnum
from typing import Final

from radixmesh.errors import NotSupported
from worker.peers import PeerLost

__all__ = ["CAPACITY", "MAX_RANKS", "Unavailable", "Why", "abort", "agree", "make_segment"]

LAYOUT: Final = 0x72784D31
MAX_RANKS: Final = 64
CAPACITY: Final = 1 << 20
DATA_AT: Final = 32768
_HEADER: Final = struct.Struct("<IIQ")  # layout, ranks, bytes of one buffer
_STOP_AT: Final = 16
_READY_AT: Final = 64  # one byte a rank
_POLL_S: Final = 0.002


class Unavailable(NotSupported):
    """Tensors cannot travel through shared memory here."""


class Why(IntEnum):
    """What the low byte of the stop word says; the rank that wrote it stands above."""

    RUNNING = 0
    CLOSED = 1
    DESYNC = 2
    SILENT = 3
    STOPPED = 4


def make_segment(tp: int, *, capacity: int = CAPACITY) -> int:
    """Return the descriptor of fresh memory for `tp` ranks; the caller closes it.

    `capacity` is bytes of one buffer, a multiple of 64; larger tensors go in parts.
    Pages that nobody writes take no memory.

    Raises:
        Unavailable: The system has no such memory, or there are too many ranks.
    """
    if sys.platform != "linux" or tp > MAX_RANKS:
        raise Unavailable(f"no memory can be shared by {tp} ranks on {sys.platform}")
    fd = os.memfd_create("radixmesh-tensors", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, DATA_AT + tp * 2 * capacity)
        os.pwrite(fd, _HEADER.pack(LAYOUT, tp, capacity), 0)
    except OSError as error:
        os.close(fd)
        raise Unavailable("no memory can be shared") from error
    return fd


def abort(fd: int) -> None:
    """End all calls in which ranks wait, now and later, within some milliseconds."""
    with mmap.mmap(fd, DATA_AT) as view:
        view[_STOP_AT] = Why.STOPPED


def agree(fd: int, rank: int, *, able: bool, timeout_s: float) -> bool:
    """Say whether this rank can use the segment, and return whether all of them can.

    Raises:
        PeerLost: A rank said nothing within the deadline, or the segment was stopped.
    """
    until = time.monotonic() + timeout_s
    with mmap.mmap(fd, DATA_AT) as view:
        _, ranks, _ = _HEADER.unpack_from(view)
        view[_READY_AT + rank] = 2 if able else 1
        while True:
            words = view[_READY_AT : _READY_AT + ranks]
            if 0 not in words:
                return 1 not in words
            if view[_STOP_AT]:
                raise PeerLost("the ranks of this stage were stopped while they met")
            if time.monotonic() > until:
                raise PeerLost(f"rank tp={words.index(0)} did not come in time")
            time.sleep(_POLL_S)
