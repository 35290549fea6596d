"""Dispatch without a named replica: least work, dispatches in flight counted, ties in turn."""

import pytest

from worker.front.dispatch import Candidate, Dispatcher


def test_the_replica_with_the_fewest_uncached_tokens_is_chosen() -> None:
    candidates = [Candidate(0, 500, 1), Candidate(1, 20, 9), Candidate(2, 500, 0)]
    assert Dispatcher().choose(candidates) == 1


def test_among_equal_tokens_the_fewest_requests_decide() -> None:
    assert Dispatcher().choose([Candidate(0, 0, 3), Candidate(1, 0, 2)]) == 1


def test_ties_rotate() -> None:
    dispatcher = Dispatcher()
    idle = [Candidate(dp_rank, 0, 0) for dp_rank in range(4)]
    assert [dispatcher.choose(idle) for _ in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_a_replica_that_is_missing_is_never_chosen_and_does_not_stop_the_turn() -> None:
    dispatcher = Dispatcher()
    without_2 = [Candidate(dp_rank, 0, 0) for dp_rank in (0, 1, 3)]
    assert [dispatcher.choose(without_2) for _ in range(6)] == [0, 1, 3, 0, 1, 3]


def test_no_candidate_is_an_error() -> None:
    with pytest.raises(ValueError, match="no candidate"):
        Dispatcher().choose([])
