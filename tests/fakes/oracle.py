"""What the fake engine must generate, said again from its definition.

Knows the model directory's files and the definition; shares no code with the
engine, the scheduler or the cache, so that agreement means something. Tests of
any service may use it as the one truth about ids.
"""

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash


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


def oracle_output(prompt: Sequence[int], ordinary: Sequence[int], count: int) -> list[int]:
    """The first `count` output ids for a prompt, when nothing ends it and nothing is banned."""
    state = oracle_state(prompt)
    output: list[int] = []
    for _ in range(count):
        output.append(ordinary[state % len(ordinary)])
        state = xxhash.xxh3_64(struct.pack("<I", output[-1]), seed=state).intdigest()
    return output


def turned(ordinary: Sequence[int], folder: str) -> list[int]:
    """The vocabulary as an engine draws from it after `update_weights` from a directory."""
    first = xxhash.xxh3_64_intdigest(folder.encode()) % len(ordinary)
    return [*ordinary[first:], *ordinary[:first]]
