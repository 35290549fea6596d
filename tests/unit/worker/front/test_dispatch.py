"""Dispatch without a named replica: least burden, dispatches in flight counted, ties in turn."""

from typing import get_args

import pytest

from worker.front.dispatch import BURDENS, Candidate, Dispatcher
from worker.settings import WorkerSettings


def test_the_replica_with_the_fewest_uncached_tokens_is_chosen() -> None:
    candidates = [Candidate(0, 500, 1), Candidate(1, 20, 9), Candidate(2, 500, 0)]
    assert Dispatcher().choose(candidates) == 1


def test_among_equal_tokens_the_fewest_requests_decide() -> None:
    assert Dispatcher().choose([Candidate(0, 0, 3), Candidate(1, 0, 2)]) == 1


def test_the_shortest_queue_is_chosen_whatever_its_prompts() -> None:
    candidates = [Candidate(0, 0, 3), Candidate(1, 5_000, 2), Candidate(2, 0, 4)]
    assert Dispatcher("shortest_queue").choose(candidates) == 1


def test_round_robin_looks_at_no_load() -> None:
    dispatcher = Dispatcher("round_robin")
    candidates = [Candidate(0, 900, 9), Candidate(1, 0, 0), Candidate(2, 50, 1)]
    assert [dispatcher.choose(candidates) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_the_flag_offers_exactly_the_policies_that_exist() -> None:
    flag = WorkerSettings.model_fields["dispatch"]
    assert set(get_args(flag.annotation)) == set(BURDENS)


@pytest.mark.parametrize("policy", BURDENS)
def test_ties_rotate(policy: str) -> None:
    dispatcher = Dispatcher(policy)
    idle = [Candidate(dp_rank, 0, 0) for dp_rank in range(4)]
    assert [dispatcher.choose(idle) for _ in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_replica_that_is_missing_is_never_chosen_and_does_not_stop_the_turn() -> None:
    dispatcher = Dispatcher()
    without_2 = [Candidate(dp_rank, 0, 0) for dp_rank in (0, 1, 3)]
    assert [dispatcher.choose(without_2) for _ in range(6)] == [0, 1, 3, 0, 1, 3]


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        Dispatcher().choose([])
