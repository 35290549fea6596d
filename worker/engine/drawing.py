"""From the logits of a stage's tp ranks to the result of a step, the same on all of them.

Each rank has the logits of its part of the vocabulary. Where only the likeliest ids are
asked for, the ranks exchange those; else one rank gets all logits and decides for all,
so that unlike hosts cannot round to different ids. Knows rows, logits and the group;
knows no model.
"""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor

from worker.engine.engine import StepPlan, StepResult
from worker.engine.sampler import draw, is_plain_greedy
from worker.engine.scores import score
from worker.parallel.group import TensorGroup

logger = logging.getLogger(__name__)

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(StepResult)
_NAN: Final = float("nan")


def encode(result: StepResult) -> bytes:
    """Return a result as bytes, for other ranks."""
    return _ENCODER.encode(result)


def decode(data: bytes) -> StepResult:
    """Read `encode`'s bytes back."""
    return _DECODER.decode(data)


def draw_step(
    logits: Tensor, plan: StepPlan, group: TensorGroup, vocabularies: Sequence[range]
) -> StepResult:
    """Return what a step draws and how likely its prompts are.

    Args:
        logits: [rows that draw, then targets of all rows; this rank's part of the vocabulary].
        plan: The step.
        group: The ranks of the last stage.
        vocabularies: Part of the vocabulary of each of them, in rising order.
    """
    if group.size == 1:
        return _result(logits, plan)
    drawing = [row for row in plan.rows if row.sampled]
    scored = [row for row in plan.rows if row.targets]
    if not drawing and not scored:
        return StepResult([], [])
    if not scored and all(map(is_plain_greedy, drawing)):
        ids, unusable = greedy(logits, group, vocabularies[group.rank])
        _warn(plan, unusable)
        return StepResult(ids, [_NAN] * len(ids))
    whole = gather_vocabulary(logits, group, vocabularies)
    decided = encode(_result(whole, plan)) if group.rank == 0 else b""
    return decode(_from_first(decided, group, logits.device))


def greedy(logits: Tensor, group: TensorGroup, part: range) -> tuple[list[int], int]:
    """Return the likeliest id of each row over all ranks; the lowest of equal ones.

    Args:
        logits: [rows, part of the vocabulary]; NaN counts as impossible.
        group: The ranks.
        part: Of this rank; the ranks' parts rise with their numbers.

    Returns:
        The ids, and how many rows had no number in them: those draw id 0.
    """
    largest = torch.finfo(torch.float32).max
    clean = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=largest, neginf=-torch.inf)
    best, where = clean.max(-1).values, clean.argmax(-1)
    # Doubles hold a float32 and an id exactly, so one exchange brings both.
    pairs = group.all_gather(torch.stack([best.double(), (where + part.start).double()]))
    winner = pairs[:, 0].argmax(0, keepdim=True)
    ids = pairs[:, 1].gather(0, winner)[0]
    unusable = torch.isneginf(pairs[:, 0].gather(0, winner)[0])
    return ids.masked_fill(unusable, 0).long().tolist(), int(unusable.sum())


def gather_vocabulary(logits: Tensor, group: TensorGroup, vocabularies: Sequence[range]) -> Tensor:
    """Return [rows, vocabulary] of the ranks' parts [rows, part]."""
    widest = max(map(len, vocabularies))
    padded = logits.new_zeros(logits.shape[0], widest)
    padded[:, : logits.shape[1]] = logits
    parts = group.all_gather(padded)
    return torch.cat(
        [part[:, : len(own)] for part, own in zip(parts, vocabularies, strict=True)], dim=1
    )


def _result(logits: Tensor, plan: StepPlan) -> StepResult:
    drawing = [row for row in plan.rows if row.sampled]
    drawn = draw(logits[: len(drawing)], drawing)
    _warn(plan, drawn.unusable_rows)
    prompt = []
    begin = len(drawing)
    for row in plan.rows:
        if row.targets:
            own = logits[begin : begin + len(row.targets)]
            prompt.append(score(own, row.targets, row.sampling.top_logprobs))
            begin += len(row.targets)
    return StepResult(drawn.ids, drawn.logprobs, drawn.tops, prompt)


def _from_first(data: bytes, group: TensorGroup, device: torch.device) -> bytes:
    """Return the bytes that rank 0 brought, on every rank."""
    size = int(group.all_gather(torch.tensor([len(data)], device=device))[0])
    brought = torch.zeros(size, dtype=torch.uint8, device=device)
    if group.rank == 0:
        brought.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return bytes(group.all_gather(brought)[0].cpu().numpy())


def _warn(plan: StepPlan, unusable_rows: int) -> None:
    if unusable_rows:
        logger.warning("logits are not numbers", extra={"step": plan.step, "rows": unusable_rows})
