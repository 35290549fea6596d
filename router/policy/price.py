"""The price: predicted seconds, one unit for all replicas, and the policy that takes the least.

Knows how replicas stand, nothing of where their numbers come from. No thresholds, no
gates: every term is continuous, so a small change of load never flips all
affinity at once. Holds no clock; chance comes from the caller's generator.
"""

import math
from random import Random
from typing import NamedTuple

import numpy as np

from router.policy.choice import Floats, Ints, Prices, Standing, Wish

# A missed prefix costs more than its own prefill: it delays all that come after. On an hour of
# real traffic 2 was enough when idle and 5 to 8 best near saturation.
ALPHA_IDLE = 2.0
ALPHA_FULL = 8.0
EXPECTED_OUTPUT = 128  # ids of one output, where the limit says nothing better
CROWDING_WEIGHT = 0.25
REUSE_CHANCE = 0.1  # that a block which must go would have been asked for again
# Learned rates differ by some percent from one replica to the next without meaning anything.
# Prices that differ by less than this part of the cheapest prefill count as nearly equal.
TIE_WIDTH = 0.05
_NEVER_DRAWN = 40.0  # widths above the best


class Terms(NamedTuple):
    """What a price needs of one replica, worked out when its load changes.

    Attributes:
        token_s: Seconds to prefill one id.
        queue_s: Seconds of prefill that are queued.
        seat_s: Wait for a free seat in the batch, seconds for each id of an output.
        crowding_s: What decoding there costs beyond an empty batch, for each id of an output.
        unused: Blocks that hold nothing.
        free: Blocks that are unused or can be evicted at once.
    """

    token_s: float
    queue_s: float
    seat_s: float
    crowding_s: float
    unused: float
    free: float


def terms(standing: Standing, rate: float, step_s: float) -> Terms:
    """Return the terms of a replica that prefills `rate` ids a second and decodes in `step_s`."""
    seats = max(1, standing.max_running)
    requests = standing.running + standing.waiting
    beyond = max(0, requests + 1 - seats)
    occupancy = requests / seats
    return Terms(
        token_s=1 / rate,
        queue_s=standing.uncached_tokens / rate,
        seat_s=beyond * step_s / seats,
        # Decoding is bound by memory: company is nearly free until the batch is well filled.
        crowding_s=CROWDING_WEIGHT * step_s * occupancy * occupancy,
        unused=max(0, standing.free_blocks - standing.cached_blocks),
        free=standing.free_blocks,
    )


def expected_output(max_tokens: int) -> int:
    """Return how many ids an output will probably have."""
    return max(1, min(max_tokens, EXPECTED_OUTPUT))


def alpha_at(*, waiting: float, replicas: float) -> float:
    """Weight of a missing id: 2 when nobody waits, 5 at one waiting a replica, towards 8."""
    return ALPHA_IDLE + (ALPHA_FULL - ALPHA_IDLE) * waiting / (waiting + max(1.0, replicas))


def evicted_blocks(needed: Floats, unused: Floats, free: Floats) -> Floats:
    """Blocks that must go for so many new ones, by the chance that somebody misses them."""
    cached: Floats = REUSE_CHANCE * np.maximum(0.0, needed - unused)
    return cached + np.maximum(0.0, needed - free)


class Price:
    """Takes the cheapest; among nearly equal ones chance decides, and so among equal ones."""

    name = "price"

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Draw by exp(-excess / width): what costs visibly more is never drawn in practice."""
        del wish
        totals = prices.total_s[rows]
        width = TIE_WIDTH * float(prices.prefill_s[rows].min())
        excess = (totals - totals.min()) / width
        near = np.flatnonzero(excess < _NEVER_DRAWN)
        if len(near) == 1:
            return int(rows[near[0]])
        weights = [math.exp(-each) for each in excess[near].tolist()]
        return int(rows[rng.choices(near.tolist(), weights)[0]])
