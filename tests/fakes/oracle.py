"""What the fake engine must generate, said again from its definition.

Knows the model directory's files and the definition; shares no code with the
engine, the scheduler or the cache, so that agreement means something. Tests of
any service may use it as the one truth about ids.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash


@dataclass(frozen=True)
class Wishes:
    """What a request asks of its draws; by themselves they ask for nothing."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()


NO_WISHES = Wishes()


def ordinary_ids(model_dir: Path) -> list[int]:
    """The vocabulary without added tokens, rising."""
    parsed = json.loads((model_dir / "tokenizer.json").read_text())
    added = [entry["id"] for entry in parsed["added_tokens"]]
    return sorted(number for number in parsed["model"]["vocab"].values() if number not in added)


def oracle_state(ids: Sequence[int]) -> int:
    """The 64-bit state after `ids`."""
    state = 0x9E3779B97F4A7C15
    for number in ids:
        state = xxhash.xxh3_64(struct.pack("<I", number), seed=state).intdigest()
    return state


def oracle_next(ids: Sequence[int], ordinary: Sequence[int]) -> int:
    """The id that follows `ids`."""
    return ordinary[oracle_state(ids) % len(ordinary)]


def oracle_output(
    prompt: Sequence[int], ordinary: Sequence[int], count: int, wishes: Wishes = NO_WISHES
) -> list[int]:
    """The first `count` output ids for a prompt, when nothing ends it and no end is banned."""
    state = oracle_state(prompt)
    ids = list(prompt)
    for _ in range(count):
        ids.append(_drawn(state, ids, len(prompt), ordinary, wishes))
        state = xxhash.xxh3_64(struct.pack("<I", ids[-1]), seed=state).intdigest()
    return ids[len(prompt) :]


def _drawn(
    state: int, ids: Sequence[int], prompt_tokens: int, ordinary: Sequence[int], wishes: Wishes
) -> int:
    penalties = (wishes.repetition, wishes.presence, wishes.frequency)
    if penalties != (1.0, 0.0, 0.0):
        counted = struct.pack("<dddI", *penalties, prompt_tokens) + struct.pack(
            f"<{len(ids)}I", *ids
        )
        state = xxhash.xxh3_64(counted, seed=state).intdigest()
    forced = sorted(number for number, bias in wishes.bias if bias >= 100)
    if forced:
        return forced[state % len(forced)]
    banned = {number for number, bias in wishes.bias if bias <= -100}
    first = state % len(ordinary)
    ring = [*ordinary[first:], *ordinary[:first]]
    return next(number for number in ring if number not in banned)


def oracle_likeliest(
    ids: Sequence[int], ordinary: Sequence[int], count: int
) -> list[tuple[int, float]]:
    """The likeliest ids after `ids`, with their logprobs."""
    state = oracle_state(ids)
    best = -(state % 1000) / 1000
    return [(ordinary[(state + far) % len(ordinary)], best - far) for far in range(count)]


def oracle_logprob(ids: Sequence[int], number: int, ordinary: Sequence[int]) -> float:
    """How likely an ordinary id is after `ids`."""
    return dict(oracle_likeliest(ids, ordinary, len(ordinary)))[number]


def turned(ordinary: Sequence[int], folder: str) -> list[int]:
    """The vocabulary as an engine draws from it after `update_weights` from a directory."""
    first = xxhash.xxh3_64_intdigest(folder.encode()) % len(ordinary)
    return [*ordinary[first:], *ordinary[:first]]
