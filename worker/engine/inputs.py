"""A step's plan as tensors: one flat batch, no padding to the longest prompt.

Knows rows, positions, slots and masks; knows no model. Rows that compute one id
are attended together, grouped by length; longer rows each for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.engine.engine import Row

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of one id each and of similar length.

    Attributes:
        rows: [B] index of each in the flat batch.
        blocks: [B, n] block tables, padded by each table's own first block.
        mask: [B, 1, 1, n * block_tokens] added to the scores: 0 where known, else -inf.
    """

    rows: Tensor
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Prefill:
    """A row of several ids, at [begin, end) of the flat batch.

    Attributes:
        kv_len: Positions up to its last id.
        blocks: [1, n] block table, or None when nothing lies before it: then it attends
            to its own keys and the pool need not be read.
        mask: [ids, kv_len] added to the scores, or None for the plain causal triangle.
    """

    begin: int
    end: int
    kv_len: int
    blocks: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: T ids of all rows, one after the other.

    Attributes:
        ids: [1, T] token ids.
        positions: [1, T] position of each in its sequence.
        slots: [T] where each one's KV goes: block * block_tokens + offset.
        keep: Indices whose logits are wanted: the last id of each row that draws, then,
            of each row with targets, the ids before them; both in the plan's order.
    """

    ids: Tensor
    positions: Tensor
    slots: Tensor
    keep: Tensor
    decode: tuple[DecodeGroup, ...]
    prefill: tuple[Prefill, ...]


def make_batch(
    rows: Sequence[Row], *, block_tokens: int, dtype: torch.dtype, device: torch.device
) -> Batch:
    """Flatten rows into one batch on `device`; masks have `dtype`."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    draws: list[int] = []
    scored: list[int] = []
    singles: list[tuple[int, Row]] = []
    prefill: list[Prefill] = []
    for row in rows:
        begin, end = len(ids), len(ids) + len(row.ids)
        ids.extend(row.ids)
        span = range(row.start, row.start + len(row.ids))
        positions.extend(span)
        slots.extend(row.blocks[p // block_tokens] * block_tokens + p % block_tokens for p in span)
        if row.sampled:
            draws.append(end - 1)
        if row.targets:
            scored.extend(range(begin, begin + len(row.targets)))
        if len(row.ids) == 1:
            singles.append((begin, row))
        else:
            prefill.append(_prefill(row, (begin, end), block_tokens, dtype, device))
    return Batch(
        ids=_longs(ids, device)[None],
        positions=_longs(positions, device)[None],
        slots=_longs(slots, device),
        keep=_longs(draws + scored, device),
        decode=tuple(
            _decode_group(group, block_tokens, dtype, device)
            for group in _by_length(singles, block_tokens)
        ),
        prefill=tuple(prefill),
    )


def _longs(values: Sequence[int] | Sequence[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.long).to(device)


def _prefill(
    row: Row,
    span: tuple[int, int],
    block_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Prefill:
    count, kv_len = len(row.ids), row.start + len(row.ids)
    if row.start == 0:
        return Prefill(*span, kv_len, None, None)
    blocks = _longs([row.blocks[: _blocks(kv_len, block_tokens)]], device)
    mask = torch.full((count, kv_len), NEVER, dtype=dtype, device=device).triu(row.start + 1)
    return Prefill(*span, kv_len, blocks, mask)


def _by_length(singles: list[tuple[int, Row]], block_tokens: int) -> list[list[tuple[int, Row]]]:
    """Group rows so that padding to a group's longest at most doubles what is read."""
    groups: list[list[tuple[int, Row]]] = []
    longest = 0
    for single in sorted(singles, key=lambda single: -single[1].start):
        blocks = _blocks(single[1].start + 1, block_tokens)
        if not groups or 2 * blocks < longest:
            groups.append([])
            longest = blocks
        groups[-1].append(single)
    return groups


def _decode_group(
    group: list[tuple[int, Row]], block_tokens: int, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    lengths = [row.start + 1 for _, row in group]
    width = _blocks(max(lengths), block_tokens)
    tables = []
    for (_, row), length in zip(group, lengths, strict=True):
        table = row.blocks[: _blocks(length, block_tokens)]
        tables.append(table + [table[0]] * (width - len(table)))
    position = torch.arange(width * block_tokens, device=device)
    hidden = position[None] >= _longs(lengths, device)[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, NEVER)
    return DecodeGroup(
        rows=_longs([begin for begin, _ in group], device),
        blocks=_longs(tables, device),
        mask=mask[:, None, None],
    )


def _blocks(tokens: int, block_tokens: int) -> int:
    return -(-tokens // block_tokens)
