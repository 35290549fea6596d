"""Fills in the ids that a plan took from the step before it, which was still computing. Pure."""

from array import array
from dataclasses import replace

from worker.engine.engine import Row, StepPlan, StepResult


def resolve(plan: StepPlan, previous: StepResult) -> StepPlan:
    """Return the plan with every future id in its place.

    `previous` is what the step launched just before drew. The given plan stays as it is:
    other ranks and the scheduler know it by its digest.

    Raises:
        IndexError: The step before drew fewer rows than the plan says.
    """
    if all(row.future < 0 for row in plan.rows):
        return plan
    rows = tuple(_resolved(row, previous.ids) if row.future >= 0 else row for row in plan.rows)
    return replace(plan, rows=rows)


def _resolved(row: Row, drawn: list[int]) -> Row:
    ids = array("I", (drawn[row.future],))
    history = None if row.history is None else row.history + ids
    return replace(row, ids=ids, future=-1, history=history)
