"""Log probabilities of the model's own distribution: of given ids and of the likeliest.

Raw ones: before bias, penalties, bans and temperature. Knows logits only. A row's
answer is a function of that row alone.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from worker.request import Tops

# So many rows of a prompt at a time: a vocabulary wide, they are large.
_SLICE = 64


def clean(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits as finite float32 or -inf, and which rows had no number in them.

    NaN counts as impossible. A row without a number becomes one where all ids are equally
    likely.

    Returns:
        [rows, vocabulary] float32, and [rows, 1] bool.
    """
    raw = torch.nan_to_num(
        logits.float(), nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf
    )
    unusable = torch.isneginf(raw.amax(-1, keepdim=True))
    return torch.where(unusable, 0.0, raw), unusable


def score(
    logits: Tensor, targets: Sequence[int], top_logprobs: int = 0
) -> tuple[list[float], Tops]:
    """Return the logprob of one id per row, and the row's likeliest ids.

    Args:
        logits: [targets, vocabulary].
        targets: Ids inside the vocabulary. One that the model calls impossible has -inf.
        top_logprobs: How many likeliest ids; with 0 there are no counts either.
    """
    logprobs: list[float] = []
    counts: list[int] = []
    ids: list[int] = []
    tops: list[float] = []
    for start in range(0, len(targets), _SLICE):
        raw, _ = clean(logits[start : start + _SLICE])
        chosen = torch.tensor(targets[start : start + _SLICE], device=raw.device)
        of_ids, likeliest = rate(raw, chosen, [top_logprobs] * len(chosen))
        logprobs += of_ids
        counts += likeliest.counts
        ids += likeliest.ids
        tops += likeliest.logprobs
    return logprobs, Tops(counts, ids, tops)


def rate(raw: Tensor, ids: Tensor, top_logprobs: Sequence[int]) -> tuple[list[float], Tops]:
    """Return the logprob of one id per row, and as many of the row's likeliest as it asks for.

    Ids of equal logits come in rising order. Impossible ids are no alternatives, so there
    may be fewer. Where no row asks for any, there are no counts.

    Args:
        raw: [rows, vocabulary], cleaned.
        ids: [rows] int64.
        top_logprobs: One number per row.
    """
    # Not logsumexp: its order of summing depends on how many rows there are.
    logprobs = raw.log_softmax(-1)
    chosen: list[float] = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
    most = min(max(top_logprobs, default=0), raw.shape[1])
    if most == 0:
        return chosen, Tops()
    likeliest = _likeliest(raw, most)
    columns = zip(
        top_logprobs, likeliest.tolist(), logprobs.gather(-1, likeliest).tolist(), strict=True
    )
    tops = Tops([], [], [])
    for asked, of_row, values in columns:
        kept = [value for value in values[:asked] if value > -math.inf]
        tops.counts.append(len(kept))
        tops.ids.extend(of_row[: len(kept)])
        tops.logprobs.extend(kept)
    return chosen, tops


def _likeliest(raw: Tensor, count: int) -> Tensor:
    """Return the `count` likeliest ids of each row, best first, then by id: [rows, count]."""
    vocabulary = raw.shape[1]
    none = vocabulary
    values, ids = raw.topk(count, -1)
    last = values[:, -1:]
    # topk takes any of those that tie for the last places; the lowest ids are meant.
    every = torch.arange(vocabulary, device=raw.device)
    tied = torch.where(raw == last, every, none).topk(count, -1, largest=False).values
    candidates = torch.cat([torch.where(values > last, ids, none), tied], -1).sort(-1).values
    values = raw.gather(-1, candidates.clamp(max=vocabulary - 1))
    values = values.masked_fill(candidates == none, -torch.inf)
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return candidates.gather(-1, order)[:, :count]
