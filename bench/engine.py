"""What does a step of the torch engine cost, against transformers' own forward? One command.

    python bench/engine.py [--model smollm2] [--threads 2] [--dtype auto] [--rounds 9]

Milliseconds of one greedy step: decoding 1, 8 and 16 sequences that each hold 512
ids, and prefilling one prompt of 512. Both run in this process, turn by turn, with
the same weights dtype and threads; transformers attends over its DynamicCache by
SDPA. Trust the ratios; the figures move with the machine, medians most when others
use it too.
"""

import argparse
import statistics
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from radixmesh.models import resolve
from radixmesh.settings import stay_offline
from worker.config import RankConfig
from worker.engine.engine import Row, StepPlan, run_step
from worker.engine.torch_engine import TorchEngine
from worker.request import Sampling

CONTEXT = 512
GREEDY = Sampling(seed=0, temperature=0.0)


@dataclass(frozen=True)
class Shape:
    """One measured step: `rows` sequences, each computing `count` ids after `start`."""

    name: str
    rows: int
    start: int
    count: int


SHAPES = (
    Shape("d1", 1, CONTEXT, 1),
    Shape("d8", 8, CONTEXT, 1),
    Shape("d16", 16, CONTEXT, 1),
    Shape("p512", 1, 0, CONTEXT),
)


def token_ids(shape: Shape) -> list[list[int]]:
    """Return ids of every row, start and count together; any ids do."""
    return [
        [(7 * row + 13 * position) % 997 for position in range(shape.start + shape.count)]
        for row in range(shape.rows)
    ]


def ours(engine: TorchEngine, shape: Shape) -> Callable[[], object]:
    """Return a function that runs the step on our engine."""
    per_row = -(-(shape.start + shape.count) // engine.info.block_tokens)
    before, now = [], []
    for row, ids in enumerate(token_ids(shape)):
        # Strided tables: pages of one sequence do not lie side by side in a busy pool.
        table = [row + shape.rows * block for block in range(per_row)]
        if shape.start:
            known = array("I", ids[: shape.start])
            before.append(Row(row, known, 0, table, False, 0, GREEDY))
        now.append(Row(row, array("I", ids[shape.start :]), shape.start, table, True, 0, GREEDY))
    run_step(engine, StepPlan(0, tuple(before)))
    plan = StepPlan(1, tuple(now))
    return lambda: run_step(engine, plan)


def theirs(model: Any, shape: Shape) -> Callable[[], object]:
    """Return a function that runs the step on transformers' forward with a DynamicCache."""
    from transformers import DynamicCache

    ids = torch.tensor(token_ids(shape))

    def forward(part: torch.Tensor, cache: DynamicCache) -> object:
        with torch.inference_mode():
            out = model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1).tolist()

    if not shape.start:
        return lambda: forward(ids, DynamicCache(config=model.config))
    cache = DynamicCache(config=model.config)
    forward(ids[:, : shape.start], cache)

    def step() -> object:
        given = forward(ids[:, shape.start :], cache)
        cache.crop(-shape.count)
        return given

    return step


def measure(steps: list[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Return milliseconds per round of each step, in turns, after one round unmeasured."""
    taken: list[list[float]] = [[] for _ in steps]
    for number in range(rounds + 1):
        for step, times in zip(steps, taken, strict=True):
            began = time.perf_counter()
            step()
            if number:
                times.append((time.perf_counter() - began) * 1e3)
    return taken


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    stay_offline()
    from transformers import AutoModelForCausalLM

    folder = resolve(options.model)
    config = RankConfig(
        model_dir=str(folder), dtype=options.dtype, threads=options.threads, kv_tokens=16384
    )
    engine = TorchEngine.load(config)
    engine.reserve(engine.info.kv_blocks)
    dtype = engine.dtype
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    print(f"{folder.name}, {dtype}, {options.threads} threads, ms a step, median (least)")
    print(f"{'':6}{'ours':>18}{'transformers':>18}{'ratio':>14}")
    for shape in SHAPES:
        pair = measure([ours(engine, shape), theirs(model, shape)], options.rounds)
        middle = [statistics.median(times) for times in pair]
        cells = [f"{m:8.1f} ({min(times):.1f})" for m, times in zip(middle, pair, strict=True)]
        ratio = f"{middle[0] / middle[1]:.2f} ({min(pair[0]) / min(pair[1]):.2f})"
        print(f"{shape.name:6}{cells[0]:>18}{cells[1]:>18}{ratio:>14}")


if __name__ == "__main__":
    main()
