"""What a step computes of one request, as the engine takes it. Pure."""

from array import array

from worker.engine.engine import Row
from worker.kvcache.radix import Chain
from worker.schedule.sequence import Sequence

# In the place of an id that is still to be drawn.
_UNKNOWN = array("I", (0,))


def row_of(sequence: Sequence, chain: Chain, count: int, *, future: int = -1) -> Row:
    """Return the row of its next `count` ids.

    `future` says which draw of the step before is the one id that is not known yet.
    """
    ids = sequence.keyed.ids
    start = sequence.planned
    sampled = start + count == len(ids) + sequence.pending
    position = len(ids) - sequence.prompt_tokens + sequence.pending
    sampling = sequence.sampling
    row = Row(
        sequence.request_id,
        _UNKNOWN if future >= 0 else ids[start : start + count],
        start,
        chain.table,
        sampled,
        position,
        sampling,
        sequence.banned(position),
        future,
        None,
        sequence.prompt_tokens,
    )
    if sampled and sampling.penalized:
        row.history = ids[:]  # A copy: the request's own goes on growing.
    if sampling.prompt_logprobs:
        row.targets = _targets(sequence, start, count)
    return row


def _targets(sequence: Sequence, start: int, count: int) -> "array[int] | None":
    end = min(start + count, sequence.prompt_tokens - 1)
    if end <= max(start, sequence.scored):
        return None
    return sequence.keyed.ids[start + 1 : end + 1]
