"""One tp rank's line through the pipeline stages, over torch.distributed.

Every receiver stands ready for as many messages as steps can be under way: a send to
who stands ready goes out at once, one to who does not takes two more hand-overs
between threads. Therefore the buffers are as large as a step can be; gloo ends a
process that gets more than it has room for. On the CPU activations are one message
that begins with the plan's digest; between CUDA devices the digest goes ahead, over
gloo. What a step drew goes back in one message as a rule, and in two when it is long.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from radixmesh.errors import RankDesync
from worker.parallel.gloo import fatal_to_peers, signed
from worker.peers import PeerGone, PeerLost

__all__ = ["GlooStages"]

_HIDDEN_TAG: Final = 1
_DEVICE_TAG: Final = 2
_RESULT_TAG: Final = 3
_REST_TAG: Final = 4
_HEADER_BYTES: Final = 64  # the digest, and how many numbers follow; what follows is aligned
_RESULT_BYTES: Final = 4096
_LENGTH_BYTES: Final = 8
_INLINE_BYTES: Final = _RESULT_BYTES - _LENGTH_BYTES


class GlooStages:
    """A stage's end of the line."""

    def __init__(
        self,
        group: Any,
        *,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Stand ready.

        Args:
            group: The process group of the line, by stage; it is closed with this.
            rows: Of the activations of one step; no step has more.
            dtype: Of the activations.
            device: Where they are computed.
        """
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._rows = rows
        self._dtype = dtype
        self._device = device
        self._sent: deque[list[tuple[Any, Tensor]]] = deque()
        self._hidden: _Inbox | None = None  # made when the width is known
        self._results: _Inbox | None = None
        if self.rank < self.size - 1:
            self._results = self._inbox(self.size - 1, _RESULT_TAG, _RESULT_BYTES)

    def __repr__(self) -> str:
        return f"<GlooStages stage {self.rank} of {self.size}>"

    def send(self, hidden: Tensor, digest: int) -> None:
        """Give the next stage activations; the caller may write over them afterwards.

        Raises:
            ValueError: There are more rows than any step has.
        """
        if len(hidden) > self._rows:
            raise ValueError(f"a step has at most {self._rows} rows, got {len(hidden)}")
        rides = self._device.type == "cpu"
        message = torch.empty(_HEADER_BYTES + rides * hidden.nbytes, dtype=torch.uint8)
        message[:16].view(torch.int64).copy_(torch.tensor([signed(digest), hidden.numel()]))
        parts = [(message, self.rank + 1, _HIDDEN_TAG)]
        if rides:
            message[_HEADER_BYTES:].view(hidden.dtype).view(hidden.shape).copy_(hidden)
        else:
            parts.append((hidden.clone(), self.rank + 1, _DEVICE_TAG))
        self._post(parts)

    def receive(self, shape: tuple[int, ...], *, digest: int) -> Tensor:
        """Wait for the previous stage's activations; all steps' have one width."""
        numbers = math.prod(shape)
        rides = self._device.type == "cpu"
        if self._hidden is None:
            room = self._rows * math.prod(shape[1:]) * self._dtype.itemsize
            self._hidden = self._inbox(self.rank - 1, _HIDDEN_TAG, _HEADER_BYTES + rides * room)
        message = self._hidden.take()
        other, brought = message[:16].view(torch.int64).tolist()
        if other != signed(digest) or brought != numbers:
            raise RankDesync(
                f"stage {self.rank - 1} sends {brought} numbers of plan {other % 2**64:016x}, "
                f"stage {self.rank} expects {numbers} of {digest:016x}"
            )
        if rides:
            end = _HEADER_BYTES + numbers * self._dtype.itemsize
            return message[_HEADER_BYTES:end].view(self._dtype).view(shape)
        hidden = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._take(hidden, self.rank - 1, _DEVICE_TAG)
        return hidden

    def publish(self, result: bytes) -> None:
        """Give every earlier stage what a step drew."""
        first = bytearray(_RESULT_BYTES)
        first[:_LENGTH_BYTES] = len(result).to_bytes(_LENGTH_BYTES, "little")
        first[_LENGTH_BYTES : _LENGTH_BYTES + len(result[:_INLINE_BYTES])] = result[:_INLINE_BYTES]
        parts = [(torch.frombuffer(first, dtype=torch.uint8), _RESULT_TAG)]
        if rest := bytearray(result[_INLINE_BYTES:]):
            parts.append((torch.frombuffer(rest, dtype=torch.uint8), _REST_TAG))
        self._post([(part, to, tag) for to in range(self.rank) for part, tag in parts])

    def result(self) -> bytes:
        """Wait for what the oldest unread step drew."""
        if self._results is None:
            raise AssertionError("the last stage draws by itself")
        inline = bytes(self._results.take().numpy())
        length = int.from_bytes(inline[:_LENGTH_BYTES], "little")
        if length <= _INLINE_BYTES:
            return inline[_LENGTH_BYTES : _LENGTH_BYTES + length]
        rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8)
        self._take(rest, self.size - 1, _REST_TAG)
        return inline[_LENGTH_BYTES:] + bytes(rest.numpy())

    def close(self) -> None:
        """Let go; the other stages' calls fail."""
        if self._group is not None:
            self._hidden = self._results = None
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
                    (dist.isend(part, group_dst=to, group=self._open(), tag=tag), part)
                    for part, to, tag in messages
                ]
            )

    def _take(self, into: Tensor, stage: int, tag: int) -> None:
        with fatal_to_peers():
            dist.recv(into, group_src=stage, group=self._open(), tag=tag)

    def _inbox(self, stage: int, tag: int, room: int) -> "_Inbox":
        return _Inbox(self._open(), stage, tag, room=room, depth=self.size)

    def _open(self) -> Any:
        if self._group is None:
            raise PeerLost("this stage has left the line")
        return self._group


class _Inbox:
    """Receives that wait for the messages of one kind from one rank, `depth` of them."""

    def __init__(self, group: Any, source: int, tag: int, *, room: int, depth: int) -> None:
        self._group = group
        self._source = source
        self._tag = tag
        self._room = room
        self._waiting: deque[tuple[Any, Tensor]] = deque()
        for _ in range(depth):
            self._stand_ready()

    def take(self) -> Tensor:
        """Wait for the next message; return its `room` bytes, of which it may fill a part."""
        if not self._waiting:
            raise PeerGone("another stage is gone")
        work, message = self._waiting.popleft()
        with fatal_to_peers():
            work.wait()
        self._stand_ready()
        return message

    def _stand_ready(self) -> None:
        message = torch.empty(self._room, dtype=torch.uint8)
        try:
            work = dist.irecv(message, group_src=self._source, group=self._group, tag=self._tag)
        except RuntimeError:
            return  # it is gone; what it sent before is still to be read
        self._waiting.append((work, message))
