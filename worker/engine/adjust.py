"""What requests do to logits before temperature: bias, penalties, bans. Pure.

In this order: `logit_bias` is added; the repetition penalty divides positive and
multiplies negative logits of ids in prompt or output; the presence penalty is taken
once, and the frequency penalty once per occurrence, from ids in the output; banned
ids become impossible. Ids outside the vocabulary mean nothing.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.engine import Row

_LARGEST = torch.finfo(torch.float32).max


def adjust(raw: Tensor, rows: Sequence[Row]) -> Tensor:
    """Return what ids are drawn from, before temperature; `raw` itself where no row asks.

    Args:
        raw: [rows, vocabulary] float32, finite or -inf, with a finite number in each row.
        rows: What each row asks for.
    """
    if not any(row.banned or row.history is not None or row.sampling.logit_bias for row in rows):
        return raw
    logits = raw.clone()
    _add_bias(logits, rows)
    _penalize(logits, rows)
    _ban(logits, rows)
    logits.clamp_(max=_LARGEST)
    # Where a row's wishes leave nothing, they cannot be kept.
    nothing = torch.isneginf(logits.amax(-1, keepdim=True))
    return torch.where(nothing, raw, logits)


class _Cells:
    """Some cells of a [rows, vocabulary] tensor, each with a number of its own."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._rows: list[NDArray[np.int64]] = []
        self._ids: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.floating]] = []

    def add(self, row: int, ids: NDArray[np.int64], numbers: NDArray[np.floating] | float) -> None:
        """Take cells of one row."""
        inside = ids < self._vocabulary
        self._rows.append(np.full(np.count_nonzero(inside), row))
        self._ids.append(ids[inside])
        self._numbers.append(np.broadcast_to(np.float64(numbers), ids.shape)[inside])

    def on(self, device: torch.device) -> tuple[tuple[Tensor, Tensor], Tensor] | None:
        """Return the cells as an index, and their numbers as float32; None without any."""
        if not self._rows:
            return None
        where = (self._to(self._rows, device), self._to(self._ids, device))
        return where, self._to(self._numbers, device).float()

    @staticmethod
    def _to(
        columns: list[NDArray[np.int64]] | list[NDArray[np.floating]], device: torch.device
    ) -> Tensor:
        return torch.from_numpy(np.concatenate(columns)).to(device)


def _add_bias(logits: Tensor, rows: Sequence[Row]) -> None:
    cells = _Cells(logits.shape[1])
    for index, row in enumerate(rows):
        if row.sampling.logit_bias:
            biases = row.sampling.biases
            cells.add(index, np.array(list(biases)), np.array(list(biases.values())))
    chosen = cells.on(logits.device)
    if chosen is not None:
        where, bias = chosen
        logits[where] += bias


def _penalize(logits: Tensor, rows: Sequence[Row]) -> None:
    repeated, given = _Cells(logits.shape[1]), _Cells(logits.shape[1])
    for index, row in enumerate(rows):
        if row.history is None:
            continue
        sampling = row.sampling
        ids = np.array(row.history, dtype=np.int64)
        if sampling.repetition_penalty != 1.0:
            repeated.add(index, ids, sampling.repetition_penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            output, counts = np.unique(ids[row.prompt_tokens :], return_counts=True)
            taken = sampling.presence_penalty + sampling.frequency_penalty * counts
            given.add(index, output, taken)
    chosen = repeated.on(logits.device)
    if chosen is not None:
        where, by = chosen
        # An id that occurs twice is read before either is written, so it is changed once.
        values = logits[where]
        logits[where] = torch.where(values > 0, values / by, values * by)
    chosen = given.on(logits.device)
    if chosen is not None:
        where, taken_off = chosen
        logits[where] -= taken_off


def _ban(logits: Tensor, rows: Sequence[Row]) -> None:
    cells = _Cells(logits.shape[1])
    for index, row in enumerate(rows):
        if row.banned:
            cells.add(index, np.array(row.banned), -np.inf)
    chosen = cells.on(logits.device)
    if chosen is not None:
        logits[chosen[0]] = -torch.inf
