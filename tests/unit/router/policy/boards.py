"""Boards made by hand for tests of policies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np

from router.policy.board import Board
from router.policy.choice import Policy, Prices, Standing, Wish

COLD = Standing(free_blocks=4096, kv_blocks=4096, max_running=64)
WISH = Wish(prompt_tokens=512, max_tokens=64)


def board_of(*standings: Standing) -> Board:
    board = Board()
    for rank, standing in enumerate(standings):
        board.add(("g", rank)).set(standing)
    return board


def fleet(count: int, **changes: object) -> Board:
    return board_of(*[replace(COLD, **changes) for _ in range(count)])  # type: ignore[arg-type]


def prices_of(board: Board, matched: Sequence[int] = (), wish: Wish = WISH) -> Prices:
    return board.price(matched or [0] * len(board), wish)


def chosen(
    board: Board,
    policy: Policy,
    matched: Sequence[int] = (),
    *,
    wish: Wish = WISH,
    draws: int = 200,
    without: int = -1,
) -> Counter[int]:
    """Return how often each replica of group `g` was drawn, by its rank."""
    rng = Random(5)
    prices = prices_of(board, matched, wish)
    rows = np.array([row for row in board.eligible_rows().tolist() if row != without])
    return Counter(board.names[policy.choose(prices, rows, wish, rng)][1] for _ in range(draws))
