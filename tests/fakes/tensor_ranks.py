"""Real processes that join as the ranks of one replica, and do there what a test names.

They are forked from a server that has imported torch once. A test gives them one of
the functions below; each answers with what it returned, or with the error it met.
"""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any, Final
from unittest.mock import patch

import msgspec
import torch

from radixmesh.errors import MeshError
from worker.config import RankConfig
from worker.parallel.join import Peers, join
from worker.parallel.segment import make_segment
from worker.parallel.world import leave

__all__ = ["Failed", "Ranks", "ranks", "shared_memory"]

_CONTEXT: Final = get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.fakes.tensor_ranks"])
ANSWER_S: Final = 15.0


@dataclass(frozen=True)
class Failed:
    """The error that a call ended with."""

    kind: str
    message: str


class _Descriptor:
    """A descriptor that a new process gets its own of."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __getstate__(self) -> object:
        return DupFd(self.fd)

    def __setstate__(self, state: Any) -> None:
        self.fd = state.detach()


class Ranks:
    """The running ranks, by number."""

    def __init__(self, processes: list[ForkServerProcess], pipes: list[Connection]) -> None:
        self.processes = processes
        self._pipes = pipes

    def tell(self, number: int, call: Callable[..., Any], *arguments: Any) -> None:
        """Have one rank call `call(peers, *arguments)`."""
        self._pipes[number].send((call, arguments))

    def answer(self, number: int) -> Any:
        """Wait for what that returned, or Failed."""
        if not wait([self._pipes[number]], ANSWER_S):
            raise AssertionError(f"rank {number} hangs")
        return self._pipes[number].recv()

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send one rank a signal."""
        pid = self.processes[number].pid
        assert pid is not None
        os.kill(pid, what)

    def each(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Have all ranks call `call(peers, *arguments)`; return what each answered."""
        for number in range(len(self._pipes)):
            self.tell(number, call, *arguments)
        return [self.answer(number) for number in range(len(self._pipes))]


@contextmanager
def ranks(
    *,
    tp: int = 1,
    pp: int = 1,
    segment: int = -1,
    bare: Collection[int] = (),
    **changes: Any,
) -> Iterator[Ranks]:
    """Start the ranks of a replica; each has joined before it answers. Ends them at last.

    `segment` is shared by all and stays the caller's; stages need one each, so it goes
    with pp=1. The ranks of `bare` find no compiler. `changes` are of RankConfig.
    """
    processes, pipes = [], []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        common = RankConfig(
            model_dir="", engine="fake", pp=pp, tp=tp, store_port=listener.getsockname()[1]
        )
        for number in range(pp * tp):
            place = {"pp_rank": number // tp, "tp_rank": number % tp}
            config = msgspec.structs.replace(common, **{**place, **changes})
            ours, theirs = _CONTEXT.Pipe()
            store = _Descriptor(listener.fileno()) if number == 0 else None
            shared = _Descriptor(segment) if segment >= 0 else None
            process = _CONTEXT.Process(
                target=_serve, args=(theirs, config, store, shared, number in bare)
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
    try:
        yield Ranks(processes, pipes)
    finally:
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.close()
            process.kill()
            process.join()
            process.close()


@contextmanager
def shared_memory(tp: int, *, capacity: int = 4096) -> Iterator[int]:
    """Make a segment; its buffers are small, so that tensors go in parts."""
    fd = make_segment(tp, capacity=capacity)
    try:
        yield fd
    finally:
        os.close(fd)


def _serve(
    pipe: Connection,
    config: RankConfig,
    store: _Descriptor | None,
    shared: _Descriptor | None,
    bare: bool,
) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    config = msgspec.structs.replace(
        config, store_fd=store.fd if store else -1, tensor_fd=shared.fd if shared else -1
    )
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    with patch.object(shutil, "which", return_value=None) if bare else nullcontext():
        peers: Peers | Failed = _attempt(join, config, dtype, torch.device("cpu"))
    try:
        while True:
            call, arguments = pipe.recv()
            pipe.send(peers if isinstance(peers, Failed) else _attempt(call, peers, *arguments))
    except EOFError:
        leave()


def _attempt(call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except MeshError as error:
        return Failed(type(error).__name__, error.message)


# What ranks do. Bits and lists come back: torch's own pickling of tensors opens more memory.


def kinds(peers: Peers) -> tuple[str, str]:
    """Say which ways were chosen."""
    return type(peers.group).__name__, type(peers.stages).__name__


def bits(tensor: torch.Tensor) -> bytes:
    """Return the bits of a tensor."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).numpy())


def numbers(seed: int, rank: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return what a rank brings in a test."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    return (torch.randn(shape, generator=generator) * 3).to(getattr(torch, dtype))


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return what a sum must be, to the bit: in float32, in the order of the ranks."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@dataclass(frozen=True)
class Deed:
    """One call: `sum` or `gather`, of `numbers(seed, rank, shape, dtype)`."""

    kind: str
    seed: int
    shape: tuple[int, ...]
    dtype: str

    def expected(self, size: int) -> bytes:
        """Return the bits that every rank must get."""
        parts = [numbers(self.seed, rank, self.shape, self.dtype) for rank in range(size)]
        return bits(added(parts) if self.kind == "sum" else torch.stack(parts))


def do(peers: Peers, deeds: list[Deed]) -> list[bytes]:
    """Make the calls, each in a plan of its own; return the bits that they gave."""
    found = []
    for plan, deed in enumerate(deeds, 2**64 - len(deeds)):
        peers.group.begin(plan)
        own = numbers(deed.seed, peers.group.rank, deed.shape, deed.dtype)
        if deed.kind == "sum":
            assert peers.group.all_reduce(own) is own
            found.append(bits(own))
        else:
            found.append(bits(peers.group.all_gather(own)))
    return found


def add_words(peers: Peers, parts: list[list[int]], dtype: str) -> bytes:
    """Sum 16-bit words that stand for numbers of the dtype."""
    own = torch.tensor(parts[peers.group.rank], dtype=torch.uint16).view(getattr(torch, dtype))
    return bits(peers.group.all_reduce(own))


def sliced(peers: Peers) -> tuple[list[float], list[float]]:
    """Sum and gather tensors whose numbers do not lie side by side; say what became of them."""
    whole = torch.arange(24.0).view(4, 6)
    peers.group.all_reduce(whole[:, ::2])
    gathered = peers.group.all_gather(whole[:, 1::2].t())
    return whole.flatten().tolist(), gathered[-1].flatten().tolist()


def gather(peers: Peers, dtype: str) -> list[list[Any]]:
    """Gather one row from each rank."""
    own = torch.tensor([peers.group.rank, 1, 0]).to(getattr(torch, dtype))
    return [row.tolist() for row in peers.group.all_gather(own)]


def plan(peers: Peers, digests: list[int]) -> bytes:
    """Sum under a plan of this rank's own."""
    peers.group.begin(digests[peers.group.rank])
    return bits(peers.group.all_reduce(torch.ones(4)))


def add(peers: Peers, size: int = 4) -> bytes:
    """Sum ones."""
    return bits(peers.group.all_reduce(torch.ones(size)))


def other_call(peers: Peers) -> list[list[Any]]:
    """Gather as many bytes as `add` sums."""
    return [row.tolist() for row in peers.group.all_gather(torch.ones(4))]


def wait_in_vain(peers: Peers) -> tuple[Any, float, float]:
    """Sum; return the error, and the seconds that it took, by the clock and of the CPU."""
    began, used = time.perf_counter(), time.process_time()
    found = _attempt(add, peers)
    return found, time.perf_counter() - began, time.process_time() - used


def close(peers: Peers) -> None:
    """Let go of both."""
    peers.close()


def send(peers: Peers, digest: int, seed: int, shape: tuple[int, ...], dtype: str) -> None:
    """Give the next stage activations, and write over them."""
    hidden = numbers(seed, 0, shape, dtype)
    peers.stages.send(hidden, digest)
    hidden.zero_()


def receive(peers: Peers, digest: int, shape: tuple[int, ...]) -> bytes:
    """Wait for activations."""
    return bits(peers.stages.receive(shape, digest=digest))


def refused(peers: Peers, shape: tuple[int, ...]) -> str:
    """Give more rows than a step may have; return the refusal."""
    try:
        peers.stages.send(torch.ones(shape), 1)
    except ValueError as error:
        return str(error)
    return ""


def idle(peers: Peers, seconds: float) -> float:
    """Do nothing for a while; say for how long."""
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


def publish(peers: Peers, results: list[bytes]) -> None:
    """Give what steps drew."""
    for result in results:
        peers.stages.publish(result)


def results(peers: Peers, count: int) -> list[bytes]:
    """Wait for what steps drew."""
    return [peers.stages.result() for _ in range(count)]


def relay(peers: Peers, steps: int) -> list[bytes]:
    """Be one stage of a pipeline that keeps as many steps under way as it has stages."""
    stages, found = peers.stages, []
    for step in range(steps + stages.size - 1):
        if step < steps:
            hidden = torch.full((1 + step % 3, 8), float(step))
            if stages.rank:
                hidden = stages.receive(tuple(hidden.shape), digest=step)
            if stages.rank < stages.size - 1:
                stages.send(hidden + 1, step)
            else:
                stages.publish(found_bits := bits(hidden))
                found.append(found_bits)
        if stages.rank < stages.size - 1 and step >= stages.size - 1:
            found.append(stages.result())
    return found
