"""Digests differ as soon as plans or results do."""

from array import array

import pytest

from worker.engine.engine import Row, StepPlan, StepResult
from worker.group.digest import PlanDigest
from worker.request import CacheDigest, Sampling

EMPTY = CacheDigest(0, 0)


def row(**changes: object) -> Row:
    values: dict[str, object] = {
        "request_id": 1,
        "ids": array("I", [5, 6]),
        "start": 0,
        "blocks": [3],
        "sampled": True,
        "output_position": 0,
        "sampling": Sampling(seed=1),
    }
    return Row(**{**values, **changes})  # type: ignore[arg-type]


def digest_of(*rows: Row, step: int = 0, cache: CacheDigest = EMPTY) -> int:
    return PlanDigest().fold_plan(StepPlan(step, rows), cache)


@pytest.mark.parametrize(
    "other",
    [
        digest_of(),
        digest_of(row(request_id=2)),
        digest_of(row(ids=array("I", [5, 7]))),
        digest_of(row(start=4)),
        digest_of(row(blocks=[2])),
        digest_of(row(blocks=[1, 3])),
        digest_of(row(sampled=False)),
        digest_of(row(output_position=1)),
        digest_of(row(future=0)),
        digest_of(row(history=array("I", [5]))),
        digest_of(row(targets=array("I", [6]))),
        digest_of(row(), row(request_id=2)),
        digest_of(row(), step=1),
        digest_of(row(), cache=CacheDigest(1, 9)),
    ],
)
def test_another_plan_has_another_digest(other: int) -> None:
    assert other != digest_of(row())


def test_equal_histories_have_equal_digests_and_history_counts() -> None:
    first, second = PlanDigest(), PlanDigest()
    for digest in (first, second):
        digest.fold_plan(StepPlan(0, (row(),)), EMPTY)
        digest.fold_result(StepResult([7], [0.0]))
    assert first.value == second.value
    second.fold_result(StepResult([], []))
    assert first.value != second.value


def test_another_drawn_id_changes_all_that_follows() -> None:
    first, second = PlanDigest(), PlanDigest()
    first.fold_result(StepResult([7], [0.0]))
    second.fold_result(StepResult([8], [0.0]))
    plan = StepPlan(1, (row(),))
    assert first.fold_plan(plan, EMPTY) != second.fold_plan(plan, EMPTY)


def test_inputs_that_show_in_no_row_count_too() -> None:
    first, second = PlanDigest(), PlanDigest()
    first.fold_inputs(b"priority 0")
    second.fold_inputs(b"priority 1")
    plan = StepPlan(1, (row(),))
    assert first.fold_plan(plan, EMPTY) != second.fold_plan(plan, EMPTY)
