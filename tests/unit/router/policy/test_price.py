"""The price and the baselines on candidates made by hand."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from router.policy.choice import Candidate, Policy
from router.policy.policies import POLICIES
from router.policy.price import Price, alpha_at, price_all

COLD = Candidate(
    group_id="g",
    dp_rank=0,
    prompt_tokens=512,
    prompt_blocks=32,
    free_blocks=4096,
    kv_blocks=4096,
    max_running=64,
)


def fleet(count: int, **changes: object) -> list[Candidate]:
    return [replace(COLD, dp_rank=rank, **changes) for rank in range(count)]  # type: ignore[arg-type]


def chosen(candidates: list[Candidate], policy: Policy, draws: int = 200) -> Counter[int]:
    rng = Random(5)
    prices = [price for price in price_all(candidates, max_tokens=64) if price.eligible]
    return Counter(policy.choose(prices, rng).price.dp_rank for _ in range(draws))


def test_equal_replicas_share_by_chance() -> None:
    shares = chosen(fleet(4), Price(), draws=4000)
    assert min(shares.values()) > 850


def test_replicas_whose_learned_rates_differ_a_little_share_too() -> None:
    candidates = [
        replace(one, prefill_rate=rate)
        for one, rate in zip(fleet(4), (1000.0, 1010.0, 990.0, 1005.0), strict=True)
    ]
    assert min(chosen(candidates, Price(), draws=4000).values()) > 500


def test_a_hit_wins_on_an_idle_fleet() -> None:
    candidates = fleet(4)
    candidates[2] = replace(candidates[2], matched_blocks=16)
    assert chosen(candidates, Price()) == {2: 200}


def test_a_miss_goes_by_load_and_never_by_the_size_of_a_tree() -> None:
    busy = replace(COLD, dp_rank=0, uncached_tokens=4000, waiting=8, cached_blocks=0)
    idle = replace(COLD, dp_rank=1, cached_blocks=4096)
    assert chosen([busy, idle], Price()) == {1: 200}


def test_an_overloaded_home_is_left_and_others_keep_theirs() -> None:
    hot = replace(COLD, dp_rank=0, matched_blocks=32, uncached_tokens=60_000, waiting=30)
    assert chosen([hot, *fleet(4)[1:]], Price())[0] == 0
    home = replace(COLD, dp_rank=1, matched_blocks=32)
    others = [replace(hot, matched_blocks=0), home, *fleet(4)[2:]]
    assert chosen(others, Price()) == {1: 200}


def test_a_step_of_load_never_flips_everything() -> None:
    """As a home fills, its advantage shrinks by small steps and changes sign once."""

    def advantage(queued: int) -> float:
        home = replace(COLD, dp_rank=0, matched_blocks=31, uncached_tokens=queued)
        prices = price_all([home, *fleet(2)[1:]], max_tokens=64)
        return prices[1].total_s - prices[0].total_s

    line = [advantage(queued) for queued in range(0, 4000, 16)]
    assert all(0 < before - after < 0.01 for before, after in pairwise(line))
    assert line[0] > 0 > line[-1]


def test_alpha_rises_smoothly_from_two_towards_eight() -> None:
    values = [alpha_at(waiting=waiting, replicas=4) for waiting in range(200)]
    assert values[0] == 2.0
    assert values[4] == 5.0
    assert 7.5 < values[-1] < 8.0
    assert all(0 < after - before < 1.3 for before, after in pairwise(values))


def test_a_slower_replica_gets_less() -> None:
    fast = replace(COLD, dp_rank=0, prefill_rate=8000.0, uncached_tokens=512)
    slow = replace(COLD, dp_rank=1, prefill_rate=1000.0)
    assert chosen([fast, slow], Price()) == {0: 200}


def test_a_replica_that_has_learned_nothing_is_taken_to_be_like_the_others() -> None:
    learned = replace(COLD, dp_rank=0, prefill_rate=100_000.0, decode_step_s=0.001)
    fresh = replace(COLD, dp_rank=1)
    assert min(chosen([learned, fresh], Price()).values()) > 60


def test_a_full_batch_and_a_full_cache_cost() -> None:
    prices = price_all(
        [
            COLD,
            replace(COLD, running=64),
            replace(COLD, cached_blocks=4096),
            replace(COLD, free_blocks=10),
        ],
        max_tokens=64,
    )
    idle, full, cached, short = prices
    assert full.wait_s > idle.wait_s == 0
    assert full.crowding_s > idle.crowding_s == 0
    assert idle.eviction_s == 0 < cached.eviction_s < short.eviction_s
    for price in prices:
        parts = price.wait_s + price.crowding_s + price.eviction_s
        assert price.total_s == pytest.approx(parts + price.alpha * price.prefill_s)


def test_a_candidate_that_cannot_be_chosen_is_priced_and_does_not_raise_alpha() -> None:
    away = replace(COLD, dp_rank=1, reason="draining", waiting=100)
    prices = price_all([COLD, away], max_tokens=64)
    assert [price.eligible for price in prices] == [True, False]
    assert prices[1].reason == "draining"
    assert prices[0].alpha == 2.0


def test_round_robin_takes_turns_and_keeps_its_turn_when_replicas_change() -> None:
    policy, rng = POLICIES["round_robin"](), Random(1)
    prices = price_all(fleet(4), max_tokens=8)

    def turn(without: int = -1) -> int:
        return policy.choose([p for p in prices if p.dp_rank != without], rng).price.dp_rank

    assert [turn() for _ in range(5)] == [0, 1, 2, 3, 0]
    assert [turn(without=1), turn(), turn(without=0), turn(without=0)] == [2, 3, 1, 2]


def test_random_ignores_prices() -> None:
    candidates = fleet(3)
    candidates[0] = replace(candidates[0], matched_blocks=32)
    assert min(chosen(candidates, POLICIES["random"](), draws=3000).values()) > 850


def test_policies_are_called_as_they_call_themselves() -> None:
    assert {name: policy().name for name, policy in POLICIES.items()} == {
        "price": "price",
        "round_robin": "round_robin",
        "random": "random",
    }
