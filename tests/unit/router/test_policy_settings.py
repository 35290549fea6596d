"""What of a policy can be set reaches it."""

from random import Random

import numpy as np
import pytest

from router.core import policy_of
from router.policy.board import Board
from router.policy.choice import Standing, Wish
from router.policy.policies import POLICIES
from router.settings import RouterSettings


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_can_be_had_by_its_name(name: str) -> None:
    assert policy_of(RouterSettings.model_validate({"policy": name})).name == name


@pytest.mark.parametrize(
    ("settings", "follows_the_cache"),
    [
        ({}, True),
        ({"cache_threshold": 0.6}, False),
        ({"balance_abs_threshold": 5}, False),
        ({"balance_abs_threshold": 5, "balance_rel_threshold": 20}, True),
    ],
)
def test_the_gate_of_cache_aware_is_where_it_was_set(
    settings: dict[str, float], follows_the_cache: bool
) -> None:
    """One replica holds half of the prompt and has ten requests, the other one request."""
    board = Board()
    for rank, waiting in enumerate((10, 1)):
        board.add(("g", rank)).set(Standing(waiting=waiting, max_running=64))
    wish = Wish(prompt_tokens=320)
    prices = board.price([10, 0], wish)
    policy = policy_of(RouterSettings.model_validate({"policy": "cache_aware", **settings}))
    chosen = policy.choose(prices, np.arange(2), wish, Random(1))
    assert chosen == (0 if follows_the_cache else 1)
