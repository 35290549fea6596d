"""What penalties and logprobs need goes to the engine, and what it says comes out once."""

from array import array

import pytest

from tests.fakes.oracle import oracle_output
from tests.fakes.replica import ORDINARY, FakeReplica, add
from worker.engine.engine import StepResult
from worker.request import Cancel, Sampling, Tops

PROMPT = list(range(3, 33))


def scoring(**values: object) -> Sampling:
    known = {"seed": 1, "max_tokens": 4, "ignore_eos": True, "prompt_logprobs": True}
    return Sampling(**{**known, **values})  # type: ignore[arg-type]


def expected(prompt: list[int]) -> list[float]:
    return [-float(one) for one in prompt[1:]]


def test_penalties_get_prompt_and_output_and_others_get_nothing() -> None:
    replica = FakeReplica()
    penalized = Sampling(seed=1, max_tokens=3, ignore_eos=True, presence_penalty=0.5)
    replica.turn(add(1, [3, 4], sampling=penalized), add(2, [5, 6]))
    replica.turn()
    first, second = (plan.rows for plan in replica.plans)
    assert first[0].history == array("I", [3, 4])
    assert second[0].history == array("I", [3, 4, *replica.outputs[1][:1]])
    assert second[0].prompt_tokens == 2
    assert first[1].history is None


def test_a_future_id_is_not_in_the_history_yet() -> None:
    replica = FakeReplica(depth=2, futures=True)
    penalized = Sampling(seed=1, max_tokens=3, ignore_eos=True, repetition_penalty=1.1)
    replica.turn(add(1, [3, 4], sampling=penalized))
    replica.turn()
    assert replica.plans[1].rows[0].future == 0
    assert replica.plans[1].rows[0].history == array("I", [3, 4])


def test_a_chunk_that_draws_nothing_carries_no_history() -> None:
    replica = FakeReplica(max_batched_tokens=8)
    penalized = Sampling(seed=1, frequency_penalty=1.0)
    replica.turn(add(1, [3] * 12, sampling=penalized))
    replica.turn()
    assert replica.plans[0].rows[0].history is None
    assert replica.plans[1].rows[0].history == array("I", [3] * 12)


@pytest.mark.parametrize(("depth", "futures"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("budget", [7, 64])
def test_every_prompt_id_but_the_first_is_scored_once(
    depth: int, futures: bool, budget: int
) -> None:
    replica = FakeReplica(depth=depth, futures=futures, max_batched_tokens=budget)
    replica.turn(add(1, PROMPT, sampling=scoring(top_logprobs=1)))
    replica.finish()
    assert replica.prompt_scores == {1: expected(PROMPT)}
    assert replica.outputs[1] == oracle_output(PROMPT, ORDINARY, 4)


def test_a_scored_prompt_is_computed_whole_even_where_it_is_cached() -> None:
    replica = FakeReplica(max_batched_tokens=64)
    replica.turn(add(1, PROMPT))
    replica.turn(add(2, PROMPT, sampling=scoring()))
    assert replica.started[2].cached_tokens == 0
    assert replica.prompt_scores == {2: expected(PROMPT)}


def test_a_queued_scored_prompt_counts_whole_in_the_load() -> None:
    replica = FakeReplica(max_running=1, max_batched_tokens=64)
    replica.turn(add(1, PROMPT, sampling=Sampling(seed=1, max_tokens=1)))
    replica.turn(add(2, [9]))
    replica.turn(add(3, PROMPT, sampling=scoring()), add(4, PROMPT))
    assert replica.load.uncached_tokens == len(PROMPT) + 2


def test_a_scored_prompt_waits_for_no_sibling() -> None:
    replica = FakeReplica(max_batched_tokens=64)
    replica.turn(add(1, PROMPT), add(2, PROMPT, sampling=scoring()))
    assert len(replica.plans[0].rows) == 2


@pytest.mark.parametrize(("depth", "futures"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("steps", range(1, 8))
def test_a_retracted_request_is_scored_to_its_end_and_never_twice(
    depth: int, futures: bool, steps: int
) -> None:
    replica = FakeReplica(
        max_running=1, max_batched_tokens=6, depth=depth, futures=futures, block_tokens=4
    )
    replica.turn(add(1, PROMPT, sampling=scoring(max_tokens=6)))
    for _ in range(steps):
        replica.turn()
    # One takes its place, and another leaves the whole prompt in the cache.
    replica.turn(add(2, [9], priority=2), add(3, [*PROMPT, 3], priority=1))
    replica.finish()
    assert replica.prompt_scores == {1: expected(PROMPT)}
    assert replica.outputs[1] == oracle_output(PROMPT, ORDINARY, 6)


def test_a_resume_tells_no_scores_of_the_prompt() -> None:
    replica = FakeReplica()
    whole = oracle_output(PROMPT, ORDINARY, 4)
    replica.turn(add(1, PROMPT, output=whole[:2], sampling=scoring()))
    replica.finish()
    assert replica.prompt_scores == {}
    assert replica.outputs[1] == whole[2:]


def test_a_prompt_of_one_id_has_nothing_to_score() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3], sampling=scoring()))
    replica.finish()
    assert replica.prompt_scores == {}


def test_alternatives_stand_with_their_ids() -> None:
    replica = FakeReplica()
    both = Sampling(seed=1, max_tokens=3, ignore_eos=True, logprobs=True, top_logprobs=2)
    replica.turn(add(1, [3, 4], sampling=both), add(2, [5, 6]))
    replica.finish()
    ids = replica.outputs[1]
    assert replica.tops[1] == [[one, 0] for one in ids]
    assert all(not best for best in replica.tops[2])


def test_alternatives_of_a_dropped_row_are_dropped_with_it() -> None:
    replica = FakeReplica(depth=2, futures=True)
    first, second = (
        Sampling(seed=1, max_tokens=5, ignore_eos=True, top_logprobs=count) for count in (2, 1)
    )
    replica.turn(add(1, [3, 4], sampling=first), add(2, [5, 6], sampling=second))
    replica.turn(Cancel([1]))
    replica.finish()
    assert replica.tops == {2: [[one] for one in replica.outputs[2]]}


def test_columns_without_alternatives_are_empty() -> None:
    replica = FakeReplica()
    assert replica.turn(add(1, [3, 4])).tops == Tops()


@pytest.mark.parametrize(
    "result",
    [
        StepResult([3], [0.0]),
        StepResult([3], [0.0], prompt=[([-1.0], Tops())]),
        StepResult([3], [0.0], tops=Tops([0, 0])),
    ],
)
def test_a_result_that_does_not_fit_its_plan_is_an_error(result: StepResult) -> None:
    replica = FakeReplica()
    replica.scheduler.apply([add(1, [3, 4, 5], sampling=scoring())], now_us=0)
    plan = replica.scheduler.plan(0)
    with pytest.raises(ValueError, match=r"scored?|shorter|longer"):
        replica.scheduler.commit(plan, result)
