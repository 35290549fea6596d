"""One tp rank's line through the pipeline stages, over torch.distributed.

Activations go in two messages: a header of a fixed size with the plan's digest, and
the numbers, which the receiver asks for only when the header is what it expects. What
a step drew goes back in one message as a rule, and in two when it is long. Sends are
kept until they have left, and no more of them than steps can be under way.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from radixmesh.errors import RankDesync
from worker.parallel.gloo import fatal_to_peers, signed
from worker.peers import PeerLost

__all__ = ["Line"]

_HEADER_TAG: Final = 1
_HIDDEN_TAG: Final = 2
_RESULT_TAG: Final = 3
_REST_TAG: Final = 4
RESULT_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8
_INLINE_BYTES: Final = RESULT_BYTES - _LENGTH_BYTES


class Line:
    """A stage's end of the line; `ranks` are their numbers in the replica, by stage."""

    def __init__(
        self, group: Any, ranks: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        self._ranks = list(ranks)
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._dtype = dtype
        self._device = device
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()

    def __repr__(self) -> str:
        return f"<Line stage {self.rank} of {self.size}>"

    def send(self, hidden: Tensor, digest: int) -> None:
        """Give the next stage activations; the caller may write over them afterwards."""
        own = hidden.detach().clone(memory_format=torch.contiguous_format)
        header = torch.tensor([signed(digest), own.numel()])
        self._post([(header, self.rank + 1, _HEADER_TAG), (own, self.rank + 1, _HIDDEN_TAG)])

    def receive(self, shape: tuple[int, ...], *, digest: int) -> Tensor:
        """Wait for the previous stage's activations."""
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        header = torch.empty(2, dtype=torch.int64)
        self._take(header, self.rank - 1, _HEADER_TAG)
        other, numbers = header.tolist()
        if other != signed(digest) or numbers != hidden.numel():
            raise RankDesync(
                f"stage {self.rank - 1} sends {numbers} numbers of plan {other % 2**64:016x}, "
                f"stage {self.rank} expects {hidden.numel()} of {digest:016x}"
            )
        self._take(hidden, self.rank - 1, _HIDDEN_TAG)
        return hidden

    def publish(self, result: bytes) -> None:
        """Give every earlier stage what a step drew."""
        first = bytearray(RESULT_BYTES)
        first[:_LENGTH_BYTES] = len(result).to_bytes(_LENGTH_BYTES, "little")
        first[_LENGTH_BYTES : _LENGTH_BYTES + len(result[:_INLINE_BYTES])] = result[:_INLINE_BYTES]
        parts = [(torch.frombuffer(first, dtype=torch.uint8), _RESULT_TAG)]
        if rest := bytearray(result[_INLINE_BYTES:]):
            parts.append((torch.frombuffer(rest, dtype=torch.uint8), _REST_TAG))
        self._post([(part, to, tag) for to in range(self.rank) for part, tag in parts])

    def result(self) -> bytes:
        """Wait for what the oldest unread step drew."""
        first = torch.empty(RESULT_BYTES, dtype=torch.uint8)
        self._take(first, self.size - 1, _RESULT_TAG)
        inline = bytes(first.numpy())
        length = int.from_bytes(inline[:_LENGTH_BYTES], "little")
        if length <= _INLINE_BYTES:
            return inline[_LENGTH_BYTES : _LENGTH_BYTES + length]
        rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8)
        self._take(rest, self.size - 1, _REST_TAG)
        return inline[_LENGTH_BYTES:] + bytes(rest.numpy())

    def close(self) -> None:
        """Let go; the other stages' calls fail."""
        if self._group is not None:
            self._sent.clear()
            dist.destroy_process_group(self._group)
            self._group = None

    def _post(self, messages: Sequence[tuple[Tensor, int, int]]) -> None:
        with fatal_to_peers():
            # What was sent so many steps ago has arrived, or the step could not be over.
            while len(self._sent) >= self.size:
                for work, _ in self._sent.popleft():
                    work.wait()
            self._sent.append(
                [
                    (dist.isend(part, self._number(to), group=self._open(), tag=tag), part)
                    for part, to, tag in messages
                ]
            )

    def _take(self, into: Tensor, source: int, tag: int) -> None:
        with fatal_to_peers():
            dist.recv(into, self._number(source), group=self._open(), tag=tag)

    def _number(self, stage: int) -> int:
        return self._ranks[stage]

    def _open(self) -> Any:
        if self._group is None:
            raise PeerLost("this stage has left the line")
        return self._group
