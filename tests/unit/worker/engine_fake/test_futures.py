"""What a plan takes from the step before it is filled in, and nothing else changes."""

from array import array
from dataclasses import replace

import pytest

from worker.engine.engine import Row, StepPlan, StepResult
from worker.engine.futures import resolve
from worker.request import Sampling

KNOWN = Row(1, array("I", [5, 6]), 0, [3], True, 0, Sampling(seed=1))
FUTURE = replace(KNOWN, request_id=2, ids=array("I", [0]), start=9, blocks=[1, 2, 4], future=1)
DRAWN = StepResult([7, 8], [0.0, 0.0])


def test_a_plan_without_futures_is_itself() -> None:
    plan = StepPlan(3, (KNOWN,))
    assert resolve(plan, StepResult([], [])) is plan


def test_a_future_id_is_the_one_that_its_row_drew() -> None:
    plan = StepPlan(3, (KNOWN, FUTURE), digest=77)
    resolved = resolve(plan, DRAWN)
    assert resolved == StepPlan(3, (KNOWN, replace(FUTURE, ids=array("I", [8]), future=-1)), 77)
    assert FUTURE.ids == array("I", [0])


def test_penalties_count_the_future_id_too() -> None:
    history = array("I", [5, 6, 9])
    row = replace(FUTURE, history=history, prompt_tokens=2)
    resolved = resolve(StepPlan(3, (row,)), DRAWN).rows[0]
    assert resolved.history == array("I", [5, 6, 9, 8])
    assert resolved.prompt_tokens == 2
    assert history == array("I", [5, 6, 9])


def test_a_step_that_drew_too_little_is_an_error() -> None:
    with pytest.raises(IndexError):
        resolve(StepPlan(3, (FUTURE,)), StepResult([7], [0.0]))
