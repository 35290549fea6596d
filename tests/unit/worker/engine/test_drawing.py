"""Ranks that each have a part of the logits draw what one rank with all of them draws.

Run: pytest tests/unit/worker/engine/test_drawing.py
"""

from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from tests.fakes.tensor_groups import thread_peers
from worker.engine.drawing import decode, draw_step, encode, greedy
from worker.engine.engine import Row, StepPlan, StepResult
from worker.parallel.group import Alone, TensorGroup
from worker.parallel.split import split_evenly
from worker.request import Sampling, Tops

T = TypeVar("T")

VOCABULARY = 50
GREEDY = Sampling(seed=0, temperature=0.0)
INF, NAN = float("inf"), float("nan")


def on_ranks(size: int, call: Callable[[TensorGroup], T]) -> list[T]:
    peers = thread_peers(size, 1)
    with ThreadPoolExecutor(size) as threads:
        calls = [threads.submit(call, peers[0, rank].group) for rank in range(size)]
        return [one.result() for one in calls]


def row(sampling: Sampling, *, targets: list[int] | None = None, sampled: bool = True) -> Row:
    made = Row(1, array("I", [1, 2, 3]), 0, [0], sampled, 0, sampling)
    made.targets = None if targets is None else array("I", targets)
    return made


def drawn(logits: Tensor, plan: StepPlan, size: int) -> StepResult:
    """Return what all ranks agree on."""
    parts = split_evenly(VOCABULARY, size)

    def one(group: TensorGroup) -> StepResult:
        own = parts[group.rank]
        return draw_step(logits[:, own.start : own.stop], plan, group, parts)

    first, *others = on_ranks(size, one)
    assert all(repr(other) == repr(first) for other in others)
    return first


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("size", [2, 3, 7])
def test_the_likeliest_id_is_found_whichever_rank_has_it(size: int) -> None:
    logits = random_logits(20)
    plan = StepPlan(1, tuple(row(GREEDY) for _ in range(20)))
    assert drawn(logits, plan, size).ids == logits.argmax(-1).tolist()


def test_the_lowest_of_equally_likely_ids_wins() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[0, [20, 30, 49]] = 1.0  # on different ranks
    logits[1, [44, 45]] = 1.0  # on one
    plan = StepPlan(1, tuple(row(GREEDY) for _ in range(3)))
    assert drawn(logits, plan, 3).ids == [20, 44, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_is_impossible_as_for_one_rank(dtype: torch.dtype) -> None:
    logits = random_logits(5).to(dtype)
    logits[0, :25] = NAN  # all of the first rank's
    logits[1] = NAN
    logits[2] = -INF
    logits[3, 40] = INF
    logits[4, 3] = NAN
    plan = StepPlan(1, tuple(row(GREEDY) for _ in range(5)))
    alone = draw_step(logits, plan, Alone(), [range(VOCABULARY)])
    assert drawn(logits, plan, 2).ids == alone.ids
    assert alone.ids[1:4] == [0, 0, 40]


def test_rows_without_a_number_are_counted_once() -> None:
    logits = torch.full((3, VOCABULARY), NAN)
    logits[1, 30] = 1.0
    parts = split_evenly(VOCABULARY, 2)
    seen = on_ranks(
        2, lambda group: greedy(logits[:, list(parts[group.rank])], group, parts[group.rank])
    )
    assert seen == [([0, 30, 0], 2)] * 2


WISHES = [
    Sampling(seed=5, temperature=1.3, top_p=0.9),
    Sampling(seed=6, temperature=0.7, top_k=5, logprobs=True, top_logprobs=4),
    Sampling(seed=0, temperature=0.0, logprobs=True),
    Sampling(seed=0, temperature=0.0, logit_bias=((49, 100.0),)),
    GREEDY,
]


@pytest.mark.parametrize("size", [2, 3])
def test_every_other_draw_is_decided_by_one_rank_from_all_logits(size: int) -> None:
    logits = random_logits(len(WISHES))
    plan = StepPlan(1, tuple(map(row, WISHES)))
    alone = draw_step(logits, plan, Alone(), [range(VOCABULARY)])
    assert repr(drawn(logits, plan, size)) == repr(alone)
    assert alone.ids[3] == 49


def test_scores_of_prompts_follow_the_draws() -> None:
    rows = (
        row(Sampling(seed=0, top_logprobs=2), targets=[7, 8, 9], sampled=False),
        row(GREEDY),
        row(Sampling(seed=0, temperature=0.0), targets=[11]),
    )
    logits = random_logits(2 + 3 + 1)
    plan = StepPlan(1, rows)
    alone = draw_step(logits, plan, Alone(), [range(VOCABULARY)])
    assert alone.ids == logits[:2].argmax(-1).tolist()
    expected = logits[2:].log_softmax(-1)
    assert alone.prompt[0][0] == pytest.approx([expected[i, 7 + i].item() for i in range(3)])
    assert alone.prompt[0][1].counts == [2, 2, 2]
    assert alone.prompt[1][0] == pytest.approx([expected[3, 11].item()])
    assert alone.prompt[1][1] == Tops()
    assert repr(drawn(logits, plan, 2)) == repr(alone)


def test_a_result_travels_whole() -> None:
    tops = Tops([2, 0], [4, 5], [-0.5, -INF])
    result = StepResult([1, 2], [-0.25, NAN], tops, [([-1.0, -INF], Tops([1], [3], [-2.0]))])
    assert repr(decode(encode(result))) == repr(result)
