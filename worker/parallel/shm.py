"""The tensor group in shared memory: for the tp ranks of a stage that share a host.

What happens is in `shm.cpp`; this hands tensors to it and turns what it found into
errors. Calls hold no GIL.
"""

import ctypes
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from radixmesh.errors import MeshError, RankDesync
from worker.config import RankConfig
from worker.parallel.native import library
from worker.parallel.segment import Unavailable, Why
from worker.peers import PeerGone, PeerLost

__all__ = ["ShmGroup"]

_SOURCE: Final = Path(__file__).with_name("shm.cpp")
_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SPIN_S: Final = 0.0002
_STOPPED, _DESYNC = 1, 2


class _Failure(ctypes.Structure):
    _fields_ = (
        ("own_digest", ctypes.c_uint64),
        ("other_digest", ctypes.c_uint64),
        ("own_bytes", ctypes.c_uint64),
        ("other_bytes", ctypes.c_uint64),
        ("culprit", ctypes.c_uint32),
        ("stop", ctypes.c_uint32),
    )


class ShmGroup:
    """The tp ranks of a stage that map one segment. Sums are made in float32, by rank."""

    def __init__(self, native: ctypes.CDLL, handle: int, *, rank: int, size: int) -> None:
        self._native = native
        self._handle = handle
        self.rank = rank
        self.size = size
        self._digest = 0

    def __repr__(self) -> str:
        return f"<ShmGroup rank {self.rank} of {self.size}>"

    @classmethod
    def open(cls, config: RankConfig) -> "ShmGroup":
        """Map the segment behind `tensor_fd`, which stays the caller's.

        Raises:
            Unavailable: It cannot be used here; see `native.library` and `make_segment`.
        """
        native = _declared(library(_SOURCE))
        handle = native.group_open(
            config.tensor_fd,
            config.tp_rank,
            config.tp,
            int(_SPIN_S * 1e9) if config.spin else 0,
            int(config.peer_timeout_s * 1e9),
        )
        if not handle:
            raise Unavailable("what was handed over is no memory for these ranks")
        return cls(native, handle, rank=config.tp_rank, size=config.tp)

    def begin(self, digest: int) -> None:
        """Name the plan that the next calls belong to."""
        self._digest = digest

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; float32, bfloat16 or float16."""
        kind = _KINDS[tensor.dtype]
        own = tensor.contiguous()
        self._check(
            self._native.group_reduce(self._open(), own.data_ptr(), own.nbytes, kind, self._digest)
        )
        return tensor if own is tensor else tensor.copy_(own)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return [size, *tensor.shape], of any dtype."""
        own = tensor.contiguous()
        parts = own.new_empty((self.size, *own.shape))
        self._check(
            self._native.group_gather(
                self._open(), own.data_ptr(), parts.data_ptr(), own.nbytes, self._digest
            )
        )
        return parts

    def close(self) -> None:
        """Let go; the other ranks' next calls fail at once."""
        self._end(leave=True)

    def release(self) -> None:
        """Let go before the first call, and tell nobody: the ranks agreed on another way."""
        self._end(leave=False)

    def _end(self, *, leave: bool) -> None:
        if self._handle:
            self._native.group_close(self._handle, leave)
            self._handle = 0

    def _open(self) -> int:
        if not self._handle:
            raise PeerLost("this rank has left the group")
        return self._handle

    def _check(self, status: int) -> None:
        if status:
            failure = _Failure()
            self._native.group_failure(self._handle, ctypes.byref(failure))
            raise self._error(status, failure)

    def _error(self, status: int, failure: _Failure) -> MeshError:
        if status == _DESYNC:
            return RankDesync(
                f"rank tp={failure.culprit} brings {failure.other_bytes} bytes of plan "
                f"{failure.other_digest:016x}, rank tp={self.rank} {failure.own_bytes} of "
                f"{failure.own_digest:016x}"
            )
        if status == _STOPPED:
            return _told(failure.stop)
        return PeerLost(f"rank tp={failure.culprit} did not come in time")


def _told(stop: int) -> MeshError:
    """Return what another rank, or the front, wrote before it stopped all."""
    who = f"rank tp={(stop >> 8) - 1}"
    match stop & 0xFF:
        case Why.DESYNC:
            return RankDesync(f"{who} found that the ranks compute different plans")
        case Why.SILENT:
            return PeerLost(f"{who} waited in vain for another rank")
        case Why.CLOSED:
            return PeerGone(f"{who} is gone")
        case _:
            return PeerLost("the ranks of this stage were stopped")


def _declared(native: ctypes.CDLL) -> ctypes.CDLL:
    pointer, word, half = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    native.group_open.argtypes = (ctypes.c_int, half, half, word, word)
    native.group_open.restype = pointer
    native.group_reduce.argtypes = (pointer, pointer, word, half, word)
    native.group_gather.argtypes = (pointer, pointer, pointer, word, word)
    native.group_failure.argtypes = (pointer, ctypes.POINTER(_Failure))
    native.group_failure.restype = None
    native.group_close.argtypes = (pointer, ctypes.c_int)
    native.group_close.restype = None
    return native
