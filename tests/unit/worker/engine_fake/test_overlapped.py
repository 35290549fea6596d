"""Steps computed in a thread of their own: same results, same errors, one step later."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.oracle import oracle_output
from tests.fakes.replica import ORDINARY, FakeReplica, add
from worker.config import FakeConfig
from worker.engine.engine import EngineInfo, Row, StepPlan
from worker.engine.fake import FakeEngine
from worker.engine.faults import Fault
from worker.engine.overlapped import Overlapped
from worker.engine.vocabulary import Vocabulary
from worker.group.record import StepRecord
from worker.group.turn import Turns
from worker.request import Inbound, Sampling


def engine(*faults: Fault) -> Overlapped:
    info = EngineInfo(block_tokens=4, kv_blocks=64, max_model_len=64, vocab_size=40, eos_ids=())
    vocabulary = Vocabulary(ordinary=ORDINARY, size=40, eos_ids=(), max_model_len=64)
    overlapped = Overlapped(FakeEngine(vocabulary, info, FakeConfig(), list(faults)))
    overlapped.reserve(64)
    return overlapped


def row(token_id: int, start: int, *, future: int = -1) -> Row:
    sampling = Sampling(seed=1, ignore_eos=True)
    return Row(1, array("I", [token_id]), start, [0, 1], True, start, sampling, future=future)


def test_a_future_id_is_what_the_step_before_drew() -> None:
    overlapped = engine()
    overlapped.launch(StepPlan(0, (row(5, 0),)))
    overlapped.launch(StepPlan(1, (row(0, 1, future=0),)))
    overlapped.launch(StepPlan(2, (row(0, 2, future=0),)))
    drawn = [overlapped.collect().ids[0] for _ in range(3)]
    overlapped.close()
    assert drawn == oracle_output([5], ORDINARY, 3)


def test_what_breaks_the_engine_is_raised_where_its_result_is_awaited() -> None:
    overlapped = engine(Fault("raise", "step", 1))
    overlapped.launch(StepPlan(0, (row(5, 0),)))
    overlapped.launch(StepPlan(1, (row(0, 1, future=0),)))
    assert overlapped.collect().ids == oracle_output([5], ORDINARY, 1)
    with pytest.raises(RuntimeError, match="scripted fault"):
        overlapped.collect()
    overlapped.close()


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.sampled_from((3, 4)), min_size=1, max_size=14), st.integers(1, 10)),
        min_size=1,
        max_size=8,
    ),
    every=st.integers(0, 3),
)
def test_an_overlapped_loop_says_what_the_normal_one_says(
    requests: list[tuple[list[int], int]], every: int
) -> None:
    replica = FakeReplica(kv_blocks=16, max_running=4, depth=2, futures=True)
    replica.engine.close()
    overlapped = engine()
    turns = Turns(overlapped, replica.scheduler, replica.cache, compared=True, depth=2)
    drawn: dict[int, list[int]] = {}
    step = 0
    while step < len(requests) * every + 1 or not turns.idle:
        arriving: list[Inbound] = [
            add(number, prompt, sampling=Sampling(seed=1, max_tokens=count, ignore_eos=True))
            for number, (prompt, count) in enumerate(requests, 1)
            if number * every == step
        ]
        plan = turns.begin(StepRecord(step=step, now_us=0, digest=turns.digest, inputs=arriving))
        output = turns.complete(plan)
        for number, token_id in zip(output.request_ids, array("I", output.token_ids), strict=True):
            drawn.setdefault(number, []).append(token_id)
        step += 1
    overlapped.close()
    assert drawn == {
        number: oracle_output(prompt, ORDINARY, count)
        for number, (prompt, count) in enumerate(requests, 1)
    }
