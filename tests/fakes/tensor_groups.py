"""Tensors between threads of one process: what `parallel/` does between processes.

As strict: calls that differ in kind, plan or shape are RankDesync, a rank that does not
come is PeerLost. Every sum runs in the order of the ranks, so all get the same bits.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from radixmesh.errors import RankDesync
from worker.parallel.group import PeerLost, Stages, TensorGroup

T = TypeVar("T")

_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ThreadPeers:
    """What one rank has of the others."""

    group: TensorGroup
    stages: Stages


def thread_peers(tp: int, pp: int) -> dict[tuple[int, int], ThreadPeers]:
    """Return the peers of every rank (pp_rank, tp_rank) of a replica."""
    meetings = [_Meeting(tp) for _ in range(pp)]
    lines = [_Line(pp) for _ in range(tp)]
    return {
        (stage, rank): ThreadPeers(
            ThreadGroup(meetings[stage], rank), ThreadStages(lines[rank], stage)
        )
        for stage in range(pp)
        for rank in range(tp)
    }


class _Meeting:
    """Where the ranks of a stage lay down what they bring."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=_TIMEOUT_S)
        self.brought: list[tuple[object, Tensor]] = [((), torch.empty(0))] * size
        self.calls = 0

    def exchange(self, rank: int, call: object, tensor: Tensor) -> list[Tensor]:
        try:
            # Nobody lays down anew before all have taken.
            self.brought[rank] = (call, tensor.clone())
            self.barrier.wait()
            seen = list(self.brought)
            if self.barrier.wait() == 0:
                self.calls += 1
        except threading.BrokenBarrierError as error:
            raise PeerLost("another rank did not come") from error
        if any(other != call for other, _ in seen):
            self.barrier.abort()
            raise RankDesync(f"ranks make different calls: {[other for other, _ in seen]}")
        return [tensor for _, tensor in seen]


class ThreadGroup:
    """A TensorGroup of threads."""

    def __init__(self, meeting: _Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self._digest = 0

    @property
    def calls(self) -> int:
        """How many exchanges there were."""
        return self._meeting.calls

    def begin(self, digest: int) -> None:
        self._digest = digest

    def all_reduce(self, tensor: Tensor) -> Tensor:
        parts = self._exchange("all_reduce", tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        tensor.copy_(total)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", tensor))

    def close(self) -> None:
        self._meeting.barrier.abort()

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        call = (name, self._digest, tuple(tensor.shape), tensor.dtype)
        return self._meeting.exchange(self.rank, call, tensor)


@dataclass
class _Line:
    """The queues between the stages of one tp rank."""

    size: int
    hidden: list["SimpleQueue[tuple[int, Tensor]]"] = field(init=False)
    results: list["SimpleQueue[bytes]"] = field(init=False)

    def __post_init__(self) -> None:
        self.hidden = [SimpleQueue() for _ in range(self.size)]
        self.results = [SimpleQueue() for _ in range(self.size)]


class ThreadStages:
    """Stages of threads."""

    def __init__(self, line: _Line, rank: int) -> None:
        self._line = line
        self.rank = rank
        self.size = line.size

    def send(self, hidden: Tensor, digest: int) -> None:
        self._line.hidden[self.rank + 1].put((digest, hidden.clone()))

    def receive(self, shape: tuple[int, ...], *, digest: int) -> Tensor:
        sent, hidden = _get(self._line.hidden[self.rank].get)
        if sent != digest or tuple(hidden.shape) != shape:
            raise RankDesync(f"got {tuple(hidden.shape)} of {sent}, expected {shape} of {digest}")
        return hidden

    def publish(self, result: bytes) -> None:
        assert self.rank == self.size - 1
        for queue in self._line.results[:-1]:
            queue.put(result)

    def result(self) -> bytes:
        return _get(self._line.results[self.rank].get)

    def close(self) -> None:
        """Nothing is held."""


def _get(get: Callable[..., T]) -> T:
    try:
        return get(timeout=_TIMEOUT_S)
    except Empty as error:
        raise PeerLost("another stage sent nothing") from error
