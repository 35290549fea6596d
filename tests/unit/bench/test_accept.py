"""The verdicts of the acceptance set and the table of the sweep, on rows made by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.replay import accept, sweep
from bench.replay.accept import Goal, against_best
from bench.replay.batch import Row, Task, names_of, run_all
from bench.replay.job import ReplayError
from bench.replay.rivals import NAMES
from bench.replay.simulate import Setup
from bench.replay.workloads import WORKLOADS
from router.policy.price import SHAPE


def rows(**means: list[float]) -> list[Row]:
    return [
        {"policy": policy, "ttft_mean_s": mean, "load": 0.9, "routers": 1}
        for policy, found in means.items()
        for mean in found
    ]


def test_a_goal_is_kept_up_to_its_factor() -> None:
    assert Goal("x", 0.5, 1.0, "y", 0.5).kept
    assert not Goal("x", 0.51, 1.0, "y", 0.5).kept
    assert str(Goal("x", 0.51, 1.0, "y", 0.5)).startswith("FAIL")


def test_ours_is_compared_with_the_best_other_by_medians() -> None:
    goal = against_best(
        "m", rows(price=[1, 2, 90], good=[4, 4, 400], bad=[5, 5, 5]), "ttft_mean_s", 0.6
    )
    assert (goal.ours, goal.best, goal.rival) == (2, 4, "good")
    assert goal.kept


def test_the_set_has_every_policy_at_every_load_and_every_workload() -> None:
    traced = accept.trace_tasks(Path("t"), 0)
    assert {(task.policy, task.setup.load) for task in traced if not task.spread} == {
        (policy, load) for policy in NAMES for load in (0.55, 0.75, 0.9)
    }
    assert [task.setup.routers for task in traced if task.spread] == [1, 4] * 3
    made = accept.workload_tasks(accept.SEEDS, (accept.OURS, *accept.RIVALS))
    assert len(made) == len(WORKLOADS) * 6 * 5


def test_each_variant_of_a_sweep_differs_from_the_shipped_shape() -> None:
    assert sweep.VARIANTS["shipped"] == SHAPE
    others = [shape for name, shape in sweep.VARIANTS.items() if name != "shipped"]
    assert all(shape != SHAPE for shape in others)


def test_a_shape_reaches_the_board() -> None:
    task = Task(source="siblings", policy="price", setup=Setup(seed=1))
    selfish = replace(task, shape=replace(SHAPE, idle=1.0, full=1.0, lane=0.0))
    ours, theirs = run_all([task, selfish], processes=1)
    assert float(str(ours["hit"])) > float(str(theirs["hit"])) + 0.02


def test_names_are_checked() -> None:
    assert names_of("all", ["a", "b"]) == ["a", "b"]
    assert names_of("b, a", ["a", "b"]) == ["b", "a"]
    with pytest.raises(ReplayError, match="'c' is not known"):
        names_of("a,c", ["a", "b"])
