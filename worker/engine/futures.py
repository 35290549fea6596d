"""Fills in the ids that a plan took from the step before it, which was still computing. Pure."""

from array import array

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
    return StepPlan(plan.step, rows, plan.digest)


def _resolved(row: Row, drawn: list[int]) -> Row:
    token_id = drawn[row.future]
    ids = array("I", (token_id,))
    return Row(
        request_id=row.request_id,
        ids=ids,
        start=row.start,
        blocks=row.blocks,
        sampled=row.sampled,
        output_position=row.output_position,
        sampling=row.sampling,
        banned=row.banned,
        history=None if row.history is None else row.history + ids,
        prompt_tokens=row.prompt_tokens,
        targets=row.targets,
    )
