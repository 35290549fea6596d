"""Asks every rank of a replica whether it can do something, so that all do it or none.

Knows the two ways to the other ranks; knows no model.
"""

import torch
from torch import Tensor

from worker.parallel.group import Stages, TensorGroup

# Of no plan: no step is under way when ranks agree.
_NO_PLAN = 0
_YES, _NO = b"\x01", b"\x00"


def all_can(own: bool, group: TensorGroup, stages: Stages, like: Tensor) -> bool:
    """Return whether all ranks said yes, on every one of them.

    Args:
        own: What this rank says.
        group: The ranks of its stage.
        stages: Its line through the stages.
        like: A tensor of the dtype and on the device in which activations travel.

    Raises:
        PeerLost: A rank did not answer in time.
    """
    group.begin(_NO_PLAN)
    said = group.all_gather(torch.tensor([int(own)], device=like.device))
    agreed = bool((said == 1).all())
    if stages.size == 1:
        return agreed
    # What a stage hands on holds for all stages before it, so the last one knows.
    if stages.rank > 0:
        agreed &= bool(stages.receive((1, 1), digest=_NO_PLAN)[0, 0] == 1)
    if stages.rank < stages.size - 1:
        stages.send(like.new_full((1, 1), float(agreed)), _NO_PLAN)
        return stages.result() == _YES
    stages.publish(_YES if agreed else _NO)
    return agreed
