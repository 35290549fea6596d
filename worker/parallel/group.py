"""Interfaces of the two ways in which tensors travel between the ranks of a replica.

A `TensorGroup` joins the tp ranks of one stage; `Stages` joins the same tp rank of all
stages. Control (records and marks, see `group/carrier.py`) never travels here and never
waits for what does. Every call has a deadline.
"""

from typing import Protocol

from torch import Tensor

from worker.peers import PeerLost

__all__ = ["Alone", "OneStage", "PeerLost", "Stages", "TensorGroup"]


class TensorGroup(Protocol):
    """The tp ranks of one stage. All of them make the same calls in the same order.

    Every call but `begin` and `close` raises PeerLost when another rank is gone, was told
    to stop, or did not arrive within the deadline; and RankDesync when another rank
    computes another plan. A plan decides its calls, so ranks of one plan make the same
    ones: what only some of them call is a mistake in this program, and how it ends is open.
    """

    @property
    def rank(self) -> int:
        """This rank's tp_rank."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def begin(self, digest: int) -> None:
        """Name the plan (64 bits) that all calls from now on belong to; costs no exchange."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; the same bits on every rank. Returns the tensor."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return [size, *tensor.shape]: what each rank brought. Shapes and dtypes are equal."""
        ...

    def close(self) -> None:
        """Let go; the other ranks' calls fail at once."""
        ...


class Stages(Protocol):
    """One tp rank's line through all pipeline stages. Raises as `TensorGroup` does.

    Sends never wait for the receiver; at most `pp` steps are under way, so what is
    unreceived is bounded.
    """

    @property
    def rank(self) -> int:
        """This rank's pp_rank."""
        ...

    @property
    def size(self) -> int:
        """How many stages there are."""
        ...

    def send(self, hidden: Tensor, digest: int) -> None:
        """Give the next stage this step's activations [ids, width] of the plan `digest`."""
        ...

    def receive(self, shape: tuple[int, ...], *, digest: int) -> Tensor:
        """Wait for the previous stage's activations of the plan `digest`, in the model's dtype."""
        ...

    def publish(self, result: bytes) -> None:
        """Last stage only: give what a step drew to every earlier stage."""
        ...

    def result(self) -> bytes:
        """Every stage but the last: wait for what the oldest unread step drew."""
        ...

    def close(self) -> None:
        """Let go."""
        ...


class Alone:
    """The tensor group of a stage with one rank."""

    rank = 0
    size = 1

    def __repr__(self) -> str:
        return "<Alone>"

    def begin(self, digest: int) -> None:
        """Nobody is to be told."""
        del digest

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor."""
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensor as the only one."""
        return tensor[None]

    def close(self) -> None:
        """Nothing is held."""


class OneStage:
    """The stages of a replica that has one."""

    rank = 0
    size = 1

    def __repr__(self) -> str:
        return "<OneStage>"

    def send(self, hidden: Tensor, digest: int) -> None:
        """There is no next stage."""
        del hidden, digest
        raise AssertionError("one stage sends nothing")

    def receive(self, shape: tuple[int, ...], *, digest: int) -> Tensor:
        """There is no previous stage."""
        del shape, digest
        raise AssertionError("one stage receives nothing")

    def publish(self, result: bytes) -> None:
        """Nobody is to be told."""
        del result

    def result(self) -> bytes:
        """The only stage is the last."""
        raise AssertionError("one stage draws by itself")

    def close(self) -> None:
        """Nothing is held."""
