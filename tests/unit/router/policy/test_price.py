"""The price on boards made by hand."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.board import Board
from router.policy.choice import Wish
from router.policy.price import (
    SHAPE,
    Crowd,
    Price,
    alpha_at,
    lane_s,
    regretted_ids,
)
from tests.unit.router.policy.boards import COLD, WISH, board_of, chosen, fleet, prices_of


def test_equal_replicas_share_by_chance() -> None:
    assert min(chosen(fleet(4), Price(), draws=4000).values()) > 850


def test_replicas_whose_learned_rates_differ_a_little_share_too() -> None:
    rates = (1000.0, 1010.0, 990.0, 1005.0)
    board = board_of(*[replace(COLD, prefill_rate=rate, decode_step_s=0.03) for rate in rates])
    assert min(chosen(board, Price(), draws=4000).values()) > 500


def test_a_hit_wins_on_an_idle_fleet() -> None:
    assert chosen(fleet(4), Price(), [0, 0, 16, 0]) == {2: 200}


def test_a_miss_goes_by_load_and_never_by_the_size_of_a_tree() -> None:
    busy = replace(COLD, uncached_tokens=4000, waiting=8, cached_blocks=0)
    idle = replace(COLD, cached_blocks=4096)
    assert chosen(board_of(busy, idle), Price()) == {1: 200}


def test_an_overloaded_home_is_left_and_others_keep_theirs() -> None:
    hot = replace(COLD, uncached_tokens=60_000, waiting=30)
    board = board_of(hot, COLD, COLD, COLD)
    assert chosen(board, Price(), [32, 0, 0, 0])[0] == 0
    assert chosen(board, Price(), [0, 32, 0, 0]) == {1: 200}


def test_a_step_of_load_never_flips_everything() -> None:
    """As a home fills, its advantage shrinks by small steps and changes sign once."""

    def advantage(queued: int) -> float:
        board = board_of(replace(COLD, uncached_tokens=queued), COLD)
        home, other = prices_of(board, [31, 0]).total_s
        return float(other - home)

    line = [advantage(queued) for queued in range(0, 8000, 16)]
    assert all(0 < before - after < 0.01 for before, after in pairwise(line))
    assert line[0] > 0 > line[-1]


def test_one_more_waiting_request_moves_the_price_of_a_miss_by_little() -> None:
    """Never by more than a few prefills of the prompt, and never back."""

    def miss_s(waiting: int) -> float:
        every = [replace(COLD, waiting=waiting, uncached_tokens=512 * waiting)] * 4
        prices = prices_of(board_of(*every), [31, 0, 0, 0])
        return float(prices.alpha[1] * prices.prefill_s[1])

    prefill_s = 512 / 4000
    line = [miss_s(waiting) for waiting in range(60)]
    assert all(0 < after - before < 12 * prefill_s for before, after in pairwise(line))


def congestion(waiting: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    room = float((1 / (1 + waiting)).sum())
    return Crowd(0.0, len(waiting), room, 1.0).congestion


@given(st.lists(st.integers(0, 500), min_size=1, max_size=64))
def test_congestion_is_between_one_and_the_longest_queue(waiting: list[int]) -> None:
    found = congestion(np.array(waiting, float))
    assert 1 + min(waiting) - 1e-9 <= found <= 1 + max(waiting) + 1e-9


@given(st.integers(1, 63), st.integers(1, 1 << 40))
def test_a_queue_however_long_weighs_little_while_others_are_idle(busy: int, queue: int) -> None:
    waiting = np.zeros(64)
    waiting[:busy] = queue
    assert congestion(waiting) <= 64 / (64 - busy) + 1e-9


@given(st.floats(1, 1e6), st.floats(0.001, 10))
def test_alpha_rises_smoothly_from_idle_towards_full(crowd: float, more: float) -> None:
    before, after = alpha_at(crowd), alpha_at(crowd + more)
    assert alpha_at(1.0) == SHAPE.idle
    assert SHAPE.idle <= before <= after + 1e-6 <= SHAPE.full + 1e-6
    assert after - before <= 2 * SHAPE.idle * more * (crowd + more)


def test_what_many_hold_is_regretted_less_than_what_one_holds() -> None:
    one = regretted_ids(np.array([100.0, 0, 0, 0]))
    assert one.tolist() == [0, 100, 100, 100]
    three = regretted_ids(np.array([100.0, 100, 0, 100]))
    assert three == pytest.approx([0, 0, 100 / 3, 0])
    steps = regretted_ids(np.array([40.0, 0, 100]))
    assert steps == pytest.approx([60, 60 + 20, 0])


@given(st.lists(st.integers(0, 4096), min_size=1, max_size=64))
def test_regret_grows_as_less_is_held_and_is_never_above_what_is_missing(held: list[int]) -> None:
    lost = regretted_ids(np.array(held, float))
    assert all(0 <= each <= max(held) - have + 1e-6 for each, have in zip(lost, held, strict=True))
    by_depth = [loss for _, loss in sorted(zip(held, lost.tolist(), strict=True))]
    assert all(before >= after - 1e-6 for before, after in pairwise(by_depth))


def test_what_nobody_holds_weighs_alike_everywhere() -> None:
    busy = replace(COLD, waiting=9, uncached_tokens=4000)
    board = board_of(*[busy] * 4)
    short = prices_of(board, wish=Wish(prompt_tokens=16)).alpha
    assert short == pytest.approx([1.0] * 4, abs=1e-3)


def test_long_work_keeps_together_and_usual_work_does_not() -> None:
    busy = replace(COLD, waiting=9, uncached_tokens=9 * 500)
    board = board_of(*[busy] * 4)
    usual = prices_of(board, wish=Wish(prompt_tokens=500)).total_s
    assert usual.max() - usual.min() < 500 / 4000  # less than one request
    long = chosen(board, Price(), wish=Wish(prompt_tokens=20_000))
    assert long == {0: 200}


@given(st.floats(0.001, 1e3), st.floats(0, 1e3))
def test_a_lane_never_counts_more_than_the_work_itself(own_s: float, queue_s: float) -> None:
    found = lane_s(own_s, queue_s)
    assert 0 <= found <= own_s
    assert math.isfinite(found)


def test_a_burst_of_equals_is_spread_evenly() -> None:
    """What is chosen is booked at once, and no report comes in between."""
    policy, rng, counts = Price(), Random(3), [0] * 4
    places = [COLD] * 4
    board = Board()
    rows = [board.add(("g", rank)) for rank in range(4)]
    for _ in range(64):
        for row, place in zip(rows, places, strict=True):
            row.set(place)
        row_index = policy.choose(prices_of(board), board.eligible_rows(), WISH, rng)
        counts[row_index] += 1
        place = places[row_index]
        places[row_index] = replace(
            place, waiting=place.waiting + 1, uncached_tokens=place.uncached_tokens + 512
        )
    assert max(counts) - min(counts) <= 2


def test_a_slower_replica_gets_less() -> None:
    fast = replace(COLD, prefill_rate=8000.0, uncached_tokens=512)
    slow = replace(COLD, prefill_rate=1000.0)
    assert chosen(board_of(fast, slow), Price()) == {0: 200}


def test_a_replica_that_has_learned_nothing_is_taken_to_be_like_the_others() -> None:
    learned = replace(COLD, prefill_rate=100_000.0, decode_step_s=0.001)
    assert min(chosen(board_of(learned, COLD), Price()).values()) > 60


def test_a_full_batch_and_a_full_cache_cost() -> None:
    board = board_of(
        COLD,
        replace(COLD, running=64),
        replace(COLD, cached_blocks=4096),
        replace(COLD, free_blocks=10),
    )
    prices = prices_of(board)
    assert prices.wait_s[1] > prices.wait_s[0] == 0
    assert prices.crowding_s[1] > prices.crowding_s[0] == 0
    assert prices.eviction_s[0] == 0 < prices.eviction_s[2] < prices.eviction_s[3]


def test_the_parts_add_up() -> None:
    queues = [replace(COLD, waiting=n, uncached_tokens=700 * n, running=9) for n in range(5)]
    prices = prices_of(board_of(*queues), [0, 3, 9, 20, 31])
    parts = prices.wait_s + prices.alpha * prices.prefill_s + prices.crowding_s + prices.eviction_s
    assert prices.total_s == pytest.approx(parts)
    assert (prices.alpha >= 1).all()


def test_one_that_cannot_be_chosen_is_priced_and_changes_nothing_for_the_others() -> None:
    away = replace(COLD, reason="draining", waiting=100)
    prices = prices_of(board_of(COLD, COLD, away), [0, 8, 32])
    alone = prices_of(board_of(COLD, COLD), [0, 8])
    assert prices.eligible.tolist() == [True, True, False]
    assert prices.total_s[:2] == pytest.approx(alone.total_s)
    assert prices.total_s[2] > 0


def test_a_board_without_anybody_fit_still_explains() -> None:
    prices = prices_of(fleet(3, reason="down"))
    assert prices.alpha.tolist() == [1.0] * 3


def test_a_queue_takes_longer_where_others_decode_in_every_step_of_it() -> None:
    queued = replace(COLD, uncached_tokens=4096, step_tokens=512, decode_step_s=0.04)
    prices = prices_of(board_of(queued, replace(queued, running=8)), [0, 0])
    alone_s, beside_s = prices.wait_s.tolist()
    assert beside_s - alone_s == pytest.approx(4096 / 512 * 0.04)
