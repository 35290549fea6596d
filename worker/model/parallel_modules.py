"""The modules of a split model that need the other ranks of the stage.

What is split by its output (queries, keys, values, gate, up, head) stays torch's own
Linear with fewer rows. Knows tensors and the group; knows no architecture.
"""

from torch import Tensor, nn
from torch.nn import functional

from worker.parallel.group import Alone, TensorGroup


class RowParallel(nn.Module):  # type: ignore[misc]  # torch has no types here
    """A Linear of which each rank has some input columns; outputs are summed over the ranks.

    `weight` is [out, part of in]; `bias`, which every rank has, is added after the sum.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.group: TensorGroup = Alone()

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., part of in] to [..., out], the same on every rank."""
        outputs = self.group.all_reduce(functional.linear(inputs, self.weight))
        return outputs if self.bias is None else outputs + self.bias


class VocabularyParallel(nn.Module):  # type: ignore[misc]  # torch has no types here
    """An Embedding of which each rank has the rows of the ids in `span`."""

    def __init__(self, embedding: nn.Embedding, span: range) -> None:
        super().__init__()
        self.weight = embedding.weight
        self.span = span
        self.group: TensorGroup = Alone()

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids [...] to [..., width], the same on every rank."""
        local = ids - self.span.start
        absent = (local < 0) | (local >= len(self.span))
        rows = functional.embedding(local.masked_fill(absent, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(absent[..., None], 0.0))


def connect(module: nn.Module, group: TensorGroup) -> None:
    """Let all modules inside one use a group; until then each computes as if alone."""
    for each in module.modules():
        if isinstance(each, RowParallel | VocabularyParallel):
            each.group = group
