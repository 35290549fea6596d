"""The price: predicted seconds, one unit for all replicas, and the policy that takes the least.

Knows candidates, nothing of where their numbers come from. No thresholds, no
gates: every term is continuous, so a small change of load never flips all
affinity at once. Holds no clock; chance comes from the caller's generator.
"""

import math
from collections.abc import Sequence
from random import Random
from statistics import median

from router.policy.choice import Candidate, CandidatePrice, Choice

# Rates of a replica that has learned none, in a fleet that has learned none.
DEFAULT_PREFILL_RATE = 4000.0
DEFAULT_DECODE_STEP_S = 0.03
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


def price_all(candidates: Sequence[Candidate], *, max_tokens: int) -> list[CandidatePrice]:
    """Price a request at every candidate, those that can't be chosen included.

    Args:
        candidates: Replicas of one model.
        max_tokens: The request's limit of output ids.
    """
    eligible = [candidate for candidate in candidates if not candidate.reason]
    alpha = alpha_at(
        waiting=sum(candidate.waiting for candidate in eligible), replicas=len(eligible)
    )
    rates = _learned([candidate.prefill_rate for candidate in candidates], DEFAULT_PREFILL_RATE)
    steps = _learned([candidate.decode_step_s for candidate in candidates], DEFAULT_DECODE_STEP_S)
    output = max(1, min(max_tokens, EXPECTED_OUTPUT))
    return [
        _price(
            candidate,
            candidate.prefill_rate or rates,
            candidate.decode_step_s or steps,
            alpha,
            output,
        )
        for candidate in candidates
    ]


def alpha_at(*, waiting: int, replicas: int) -> float:
    """Weight of a missing id: 2 when nobody waits, 5 at one waiting a replica, towards 8."""
    return ALPHA_IDLE + (ALPHA_FULL - ALPHA_IDLE) * waiting / (waiting + max(1, replicas))


def _learned(rates: Sequence[float], default: float) -> float:
    """What to assume of a replica that has learned nothing: it is like its siblings.

    A fixed guess would starve it beside faster ones, and it would never learn.
    """
    known = [rate for rate in rates if rate > 0]
    return median(known) if known else default


def _price(
    candidate: Candidate, rate: float, step_s: float, alpha: float, output: int
) -> CandidatePrice:
    missing = max(1, candidate.prompt_tokens - candidate.matched_blocks * candidate.block_tokens)
    wait_s = _wait_s(candidate, rate, step_s, output)
    prefill_s = missing / rate
    occupancy = (candidate.running + candidate.waiting) / max(1, candidate.max_running)
    # Decoding is bound by memory: company is nearly free until the batch is well filled.
    crowding_s = CROWDING_WEIGHT * output * step_s * occupancy * occupancy
    eviction_s = _evicted_blocks(candidate, missing + output) * candidate.block_tokens / rate
    return CandidatePrice(
        group_id=candidate.group_id,
        dp_rank=candidate.dp_rank,
        eligible=not candidate.reason,
        reason=candidate.reason,
        view=candidate.view,
        prompt_blocks=candidate.prompt_blocks,
        matched_blocks=candidate.matched_blocks,
        wait_s=wait_s,
        prefill_s=prefill_s,
        alpha=alpha,
        crowding_s=crowding_s,
        eviction_s=eviction_s,
        total_s=wait_s + alpha * prefill_s + crowding_s + eviction_s,
    )


def _wait_s(candidate: Candidate, rate: float, step_s: float, output: int) -> float:
    """Seconds until the prefill of one more request could begin: work first, then a free seat."""
    beyond = max(0, candidate.running + candidate.waiting + 1 - candidate.max_running)
    seat_s = output * step_s / max(1, candidate.max_running)
    return candidate.uncached_tokens / rate + beyond * seat_s


def _evicted_blocks(candidate: Candidate, tokens: int) -> float:
    """Blocks that must go for so many new ids, by the chance that somebody misses them."""
    needed = math.ceil(tokens / max(1, candidate.block_tokens))
    unused = max(0, candidate.free_blocks - candidate.cached_blocks)
    short = max(0, needed - candidate.free_blocks)
    return REUSE_CHANCE * max(0, needed - unused) + short


class Price:
    """Takes the cheapest; among nearly equal ones chance decides, and so among equal ones."""

    name = "price"

    def choose(self, prices: Sequence[CandidatePrice], rng: Random) -> Choice:
        """Draw by exp(-excess / width): what costs visibly more is never drawn in practice."""
        best = min(price.total_s for price in prices)
        width = TIE_WIDTH * min(price.prefill_s for price in prices)
        weights = [math.exp(-(price.total_s - best) / width) for price in prices]
        return Choice(rng.choices(prices, weights)[0], self.name)
