"""What makes the digests of two ranks differ at once, though their plans are still the same."""

from collections.abc import Iterator

import pytest

from tests.fakes.rank_threads import RankThreads
from tests.fakes.replica import add
from worker.group.record import StepRecord
from worker.request import Cancel, Inbound, Sampling

ONE = Sampling(seed=1, max_tokens=1)


@pytest.fixture
def replica(request: pytest.FixtureRequest) -> Iterator[RankThreads]:
    """Two ranks that wait for input; the tests turn them by hand."""
    replica = RankThreads(tp=2, faults=getattr(request, "param", ()))
    yield replica
    replica.close()


@pytest.mark.parametrize(
    "other",
    [
        [add(1, [3, 4], sampling=ONE, timeout_ms=1000)],
        [add(1, [3, 4], sampling=Sampling(seed=2, max_tokens=1))],
        [add(1, [3, 4], sampling=Sampling(seed=1, max_tokens=1, stop_ids=(9,)))],
        [add(1, [3, 4], sampling=ONE, priority=1)],
        [add(1, [3, 4], sampling=ONE), Cancel([2])],
    ],
    ids=["deadline", "seed", "stop id", "priority", "cancel"],
)
def test_inputs_that_show_in_no_plan_yet(replica: RankThreads, other: list[Inbound]) -> None:
    plans = []
    given: list[list[Inbound]] = [[add(1, [3, 4], sampling=ONE)], other]
    for turns, inputs in zip(replica.turns, given, strict=True):
        record = StepRecord(step=0, now_us=0, digest=turns.digest, inputs=inputs)
        plans.append(turns.begin(record))
    ours, theirs = ([(row.ids, row.blocks) for row in plan.rows] for plan in plans)
    assert ours == theirs
    assert replica.turns[0].digest != replica.turns[1].digest


@pytest.mark.parametrize("replica", [["desync@step=0:tp=1"]], indirect=True)
def test_another_last_id_after_which_nothing_is_planned(replica: RankThreads) -> None:
    for turns in replica.turns:
        record = StepRecord(
            step=0, now_us=0, digest=turns.digest, inputs=[add(1, [3, 4], sampling=ONE)]
        )
        turns.complete(turns.begin(record))
        assert turns.idle
    assert replica.turns[0].digest != replica.turns[1].digest
