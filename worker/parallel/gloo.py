"""The tensor group over torch.distributed: gloo between CPUs, NCCL between CUDA devices.

Gloo ends a process when ranks bring different sizes, so the ranks compare their plans'
digests, by a message of a fixed size, before the first tensor of each plan; what
follows is then the same on all. On CPUs the parts are gathered and added in
float32 in the order of the ranks, as in shared memory: the same bits on every rank,
whatever else is in the batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from radixmesh.errors import RankDesync
from worker.peers import PeerLost

__all__ = ["GlooGroup", "fatal_to_peers", "signed"]


class GlooGroup:
    """The tp ranks of a stage, in a process group that holds nobody else."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self._digest = 0
        self._compared = False

    def __repr__(self) -> str:
        return f"<GlooGroup rank {self.rank} of {self.size}>"

    def begin(self, digest: int) -> None:
        """Name the plan; its digest is compared before the next call."""
        self._digest = digest
        self._compared = False

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if tensor.is_cuda:
            self._compare()
            with fatal_to_peers():
                dist.all_reduce(tensor, group=self._group)
            return tensor
        parts = self.all_gather(tensor)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return tensor.copy_(total)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return [size, *tensor.shape]."""
        self._compare()
        parts = tensor.new_empty((self.size, *tensor.shape))
        with fatal_to_peers():
            dist.all_gather(list(parts), tensor.contiguous(), group=self._group)
        return parts

    def close(self) -> None:
        """Let go; the other ranks' calls fail."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def _compare(self) -> None:
        if self._group is None:
            raise PeerLost("this rank has left the group")
        if self._compared:
            return
        digests = torch.empty(self.size, dtype=torch.int64)
        own = torch.tensor([signed(self._digest)])
        with fatal_to_peers():
            dist.all_gather(list(digests.split(1)), own, group=self._group)
        for rank, other in enumerate(digests.tolist()):
            if other != signed(self._digest):
                raise RankDesync(
                    f"rank tp={rank} computes plan {other % 2**64:016x}, "
                    f"rank tp={self.rank} {self._digest:016x}"
                )
        self._compared = True


def signed(digest: int) -> int:
    """Return the 64 bits of a digest as torch's int64 holds them."""
    return digest - (digest >> 63 << 64)


@contextmanager
def fatal_to_peers() -> Iterator[None]:
    """Turn what torch.distributed raises into PeerLost: a dead peer, or a deadline."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLost("another rank is gone, or gave no answer in time") from error
