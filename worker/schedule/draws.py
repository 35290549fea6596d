"""What a step's result says, taken apart row by row. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from worker.engine.engine import StepResult
from worker.request import Tops


class Draw(NamedTuple):
    """One id that was drawn, its logprob and its likeliest alternatives."""

    token_id: int
    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


_NONE: list[int] = []
_NO_LOGPROBS: list[float] = []


def draws_of(result: StepResult) -> Iterator[Draw]:
    """Iterate over what was drawn, in the plan's order.

    Raises:
        ValueError: The columns do not fit each other.
    """
    counts = result.tops.counts
    if not counts:
        for token_id, logprob in zip(result.ids, result.logprobs, strict=True):
            yield Draw(token_id, logprob, _NONE, _NO_LOGPROBS)
        return
    at = 0
    for token_id, logprob, count in zip(result.ids, result.logprobs, counts, strict=True):
        end = at + count
        yield Draw(token_id, logprob, result.tops.ids[at:end], result.tops.logprobs[at:end])
        at = end


def part_of(tops: Tops, skip: int) -> Tops:
    """Return the alternatives without those of the first `skip` ids."""
    start = sum(tops.counts[:skip])
    return Tops(tops.counts[skip:], tops.ids[start:], tops.logprobs[start:])
