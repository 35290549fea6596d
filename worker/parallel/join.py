"""How a rank joins the others of its replica: which way tensors travel, and the first meeting.

Shared memory where one was handed over and every rank of the stage can use it, else
torch.distributed. It is set up only for what needs it: a replica of one rank, or of
one stage on one host, meets nowhere.
"""

import logging
from dataclasses import dataclass

import torch

from worker.config import RankConfig
from worker.parallel.gloo import GlooGroup
from worker.parallel.group import Alone, OneStage, Stages, TensorGroup
from worker.parallel.segment import Unavailable, agree
from worker.parallel.shm import ShmGroup
from worker.parallel.stages import GlooStages
from worker.parallel.world import JOIN_TIMEOUT, world

__all__ = ["Peers", "join"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peers:
    """The other ranks, as an engine sees them."""

    group: TensorGroup
    stages: Stages

    def close(self) -> None:
        """Let go of both."""
        self.group.close()
        self.stages.close()


def join(config: RankConfig, dtype: torch.dtype, device: torch.device) -> Peers:
    """Meet the other ranks of this replica; all of them call this once, at their start.

    Args:
        config: What the rank was told.
        dtype: Of the activations that go from stage to stage.
        device: Where the rank computes.

    Raises:
        NotSupported: There is neither shared memory nor a place to meet.
        PeerLost: Not all ranks came.
    """
    group: TensorGroup = Alone()
    if config.tp > 1:
        group = _shared(config, device) or GlooGroup(world(config).form_tp())
    stages: Stages = OneStage()
    if config.pp > 1:
        rows = max(config.max_batched_tokens, config.max_running)
        line = world(config).form_line()
        stages = GlooStages(line, rows=rows, dtype=dtype, device=device)
    return Peers(group, stages)


def _shared(config: RankConfig, device: torch.device) -> ShmGroup | None:
    """Return the group in shared memory, or None where the stage has to do without."""
    if config.tensors != "shm" or config.tensor_fd < 0 or device.type != "cpu":
        return None
    group: ShmGroup | None = None
    why = "another rank cannot use it"
    try:
        group = ShmGroup.open(config)
    except Unavailable as error:
        why = error.message
    able = group is not None
    timeout_s = JOIN_TIMEOUT.total_seconds()
    if agree(config.tensor_fd, config.tp_rank, able=able, timeout_s=timeout_s):
        return group
    if group:
        group.release()
    logger.warning("no shared memory, tensors go by gloo", extra={"why": why})
    return None
