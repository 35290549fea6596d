"""Draws the next ids from logits. Pure: the same rows give the same ids, whatever the batch.

Knows logits and sampling parameters; knows no requests and keeps no state. The
draw of a row is a function of its logits, of the ids that its penalties count and
of (seed, choice, output position) alone, so a resume draws what the lost attempt
would have drawn.

In this order: logit bias, repetition penalty, presence and frequency penalty, bans
(`adjust.py`); then temperature, the top_k most likely, the fewest of those that
reach top_p of their mass, those with at least min_p times the likeliest's
probability. Ids that tie with the last one kept are kept. The draw is by the
inverse of the cumulative distribution in the order of the vocabulary. Logprobs and
their alternatives are the model's own, before all of this (`scores.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.engine.adjust import adjust
from worker.engine.engine import Row
from worker.engine.scores import clean, rate
from worker.request import NO_TOPS, Tops

# Below this a temperature divides to nothing but the argmax; it is taken as greedy.
GREEDY_BELOW = 1e-5
_SHORT_LIST = 1024
_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draws:
    """Drawn ids, in the order of the rows.

    Attributes:
        ids: One per row.
        logprobs: Of those; NaN where not asked.
        tops: The likeliest ids beside each; no counts at all when no row asked.
        unusable_rows: Rows whose logits had no number in them; they were drawn as if all
            ids were equally likely.
    """

    ids: list[int]
    logprobs: list[float]
    tops: Tops = NO_TOPS
    unusable_rows: int = 0


def draw(logits: Tensor, rows: Sequence[Row]) -> Draws:
    """Draw one id per row.

    Args:
        logits: [rows, vocabulary]. NaN counts as impossible.
        rows: What each row asks for; their ids are all known.
    """
    if not rows:
        return Draws([], [])
    raw, unusable = clean(logits)
    allowed = adjust(raw, rows)
    ids = allowed.argmax(-1)
    drawn = [index for index, row in enumerate(rows) if not _is_greedy(row)]
    if drawn:
        where = torch.tensor(drawn, device=logits.device)
        ids[where] = _draw(allowed.index_select(0, where), [rows[index] for index in drawn])
    logprobs, tops = _rate(raw, ids, rows)
    return Draws(ids.tolist(), logprobs, tops, int(unusable.sum()))


def is_plain_greedy(row: Row) -> bool:
    """Whether the argmax of the raw logits is all that a draw needs of them.

    NaN counts as -inf there, the lowest of equal ids wins, and a row without a number
    draws id 0. Says nothing of `targets`, which are about other positions.
    """
    return (
        _is_greedy(row)
        and row.history is None
        and not row.banned
        and not row.sampling.logit_bias
        and not row.sampling.logprobs
    )


def uniform(seed: int, choice: int, position: int) -> float:
    """Return the number in [0, 1) that decides a draw: numpy's Philox, counter = position."""
    # As arrays: numpy takes a list with an integer over 63 bits for floats.
    key = np.array([seed & _WORD, choice & _WORD], dtype=np.uint64)
    counter = np.array([position & _WORD, 0, 0, 0], dtype=np.uint64)
    source = np.random.Philox(key=key, counter=counter)
    return (int(source.random_raw()) >> 11) * 2.0**-53


def _is_greedy(row: Row) -> bool:
    return row.sampling.temperature < GREEDY_BELOW or row.sampling.top_k == 1


def _rate(raw: Tensor, ids: Tensor, rows: Sequence[Row]) -> tuple[list[float], Tops]:
    logprobs = [float("nan")] * len(rows)
    asking = [index for index, row in enumerate(rows) if row.sampling.logprobs]
    if not asking:
        return logprobs, NO_TOPS
    where = torch.tensor(asking, device=raw.device)
    asked = [rows[index].sampling.top_logprobs for index in asking]
    values, tops = rate(raw.index_select(0, where), ids.index_select(0, where), asked)
    for index, value in zip(asking, values, strict=True):
        logprobs[index] = value
    if not tops.counts:
        return logprobs, NO_TOPS
    counts = [0] * len(rows)
    for index, count in zip(asking, tops.counts, strict=True):
        counts[index] = count
    return logprobs, Tops(counts, tops.ids, tops.logprobs)


def _draw(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    probs = probabilities(logits, rows)
    # In double: the sum over a vocabulary must not swallow its small terms.
    cumulative = probs.double().cumsum(-1)
    draws = [uniform(r.sampling.seed, r.sampling.choice, r.output_position) for r in rows]
    point = torch.tensor(draws, dtype=torch.double).to(logits.device)[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, point, right=True)[:, 0]
    # Rounding may put the point on the total; the last possible id is meant then.
    positions = torch.arange(probs.shape[1], device=probs.device)
    return torch.minimum(ids, torch.where(probs > 0, positions, -1).amax(-1))


def probabilities(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return what each row draws from, [rows, vocabulary], float32; it need not sum to 1."""
    column = _Columns(rows, logits.device)
    scaled = (logits - logits.amax(-1, keepdim=True)) / column.of("temperature")
    probs = scaled.softmax(-1)
    threshold = probs.amax(-1, keepdim=True) * column.of("min_p")
    picky = [i for i, r in enumerate(rows) if r.sampling.top_k > 0 or r.sampling.top_p < 1]
    if picky:
        where = torch.tensor(picky, device=logits.device)
        chosen = _Columns([rows[i] for i in picky], logits.device)
        floor = _nucleus_floor(probs.index_select(0, where), chosen)
        threshold[where] = torch.maximum(threshold[where], floor)
    return probs.masked_fill(probs < threshold, 0.0)


class _Columns:
    """Sampling parameters as columns [rows, 1]."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._samplings = [row.sampling for row in rows]
        self._device = device

    def of(self, name: str) -> Tensor:
        values = [getattr(sampling, name) for sampling in self._samplings]
        return torch.tensor(values, dtype=torch.float32).to(self._device)[:, None]


def _nucleus_floor(probs: Tensor, column: _Columns) -> Tensor:
    """Return the smallest probability that top_k and top_p keep, [rows, 1]."""
    vocabulary = probs.shape[1]
    top_k = column.of("top_k").long()
    top_k = torch.where(top_k > 0, top_k.clamp(max=vocabulary), vocabulary)
    top_p = column.of("top_p")
    # A full sort is dear and seldom needed: the likeliest few hold nearly all of top_p.
    short = min(_SHORT_LIST, vocabulary)
    ordered = probs.topk(short, -1).values
    floor = _floor(ordered, top_k, top_p, vocabulary)
    if short < vocabulary:
        # Row by row, or a row's rounding would depend on the rows beside it.
        rest = (~_suffices(ordered, top_k, top_p, vocabulary)).nonzero()[:, 0]
        if len(rest):
            ordered = probs.index_select(0, rest).sort(-1, descending=True).values
            floor[rest] = _floor(ordered, top_k[rest], top_p[rest], vocabulary)
    return floor


def _floor(ordered: Tensor, top_k: Tensor, top_p: Tensor, vocabulary: int) -> Tensor:
    last = ordered.gather(-1, (top_k - 1).clamp(max=ordered.shape[1] - 1))
    last = torch.where(top_k < vocabulary, last, 0.0)
    kept = torch.where(ordered >= last, ordered, 0.0)
    reached = kept.double().cumsum(-1)
    mass = torch.where(top_k < vocabulary, reached[:, -1:], 1.0)
    needed = (reached < top_p * mass).sum(-1, keepdim=True).clamp(max=ordered.shape[1] - 1)
    by_mass = torch.where(top_p < 1, kept.gather(-1, needed), 0.0)
    return torch.maximum(last, by_mass)


def _suffices(ordered: Tensor, top_k: Tensor, top_p: Tensor, vocabulary: int) -> Tensor:
    """Whether the likeliest few decide: all ties of the k-th, or all of top_p, are among them.

    Returns [rows] bool.
    """
    limit = ordered.shape[1]
    last = ordered.gather(-1, (top_k - 1).clamp(max=limit - 1))
    by_count = (top_k < limit) & (ordered[:, -1:] < last)
    mass = ordered.double().cumsum(-1)[:, -1:]
    by_mass = (top_k == vocabulary) & (mass >= top_p)
    return (by_count | by_mass)[:, 0]
