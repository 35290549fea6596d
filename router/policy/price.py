"""The price: predicted seconds, one unit for all replicas, and the policy that takes the least.

    price = wait + prefill + pressure x (what is lost by computing it there) + crowding + eviction

Wait and prefill are the request's own. The rest is what others pay. Computing again what another
replica holds makes all wait longer who come later, the more the fuller the fleet is: that is
the pressure. In receipts prefill and loss appear as alpha x prefill. Knows how replicas stand,
nothing of where their numbers come from. No thresholds, no gates: every term is continuous, so
a small change of load never flips all affinity at once. Holds no clock; chance comes from the
caller's generator. `python -m bench.replay.sweep` shows what each constant is worth.
"""

import math
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

import numpy as np

from router.policy.choice import Floats, Ints, Prices, Standing, Wish

EXPECTED_OUTPUT = 128  # ids of one output, where the limit says nothing better
# Learned rates differ by some percent from one replica to the next without meaning anything.
# Prices that differ by less than this part of the cheapest prefill count as nearly equal.
TIE_WIDTH = 0.05
_NEVER_DRAWN = 40.0  # widths above the best
_STEEP = 6  # how soon what is longer counts as long
_CROWDED = 6  # how late lanes begin to matter as a fleet fills


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The constants of the price. One set for all loads and workloads.

    Attributes:
        idle: Weight of a missing id where nobody waits, its own prefill included.
        full: What that weight tends to as queues grow.
        power: How fast: the weight begins as idle x congestion^power.
        lane: How many times its own time long work may wait for short work, in a crowded fleet:
            so far is it steered to the replicas that are first by name.
        long: What part of the usual queue work must take to count as long.
        crowding: What a full batch adds to a decode step, in steps.
        reuse: Chance that a block which must go would have been asked for again.
    """

    idle: float = 2.0
    full: float = 64.0
    power: float = 1.65
    lane: float = 40.0
    long: float = 0.35
    crowding: float = 0.25
    reuse: float = 0.1


SHAPE: Final = Shape()


class Terms(NamedTuple):
    """What a price needs of one replica, worked out when its load changes.

    Attributes:
        token_s: Seconds to prefill one id.
        seat_s: Wait for a free seat in the batch, seconds for each id of an output.
        crowding_s: What decoding there costs beyond an empty batch, for each id of an output.
        unused: Blocks that hold nothing.
        free: Blocks that are unused or can be evicted at once.
        queue_s: Seconds of prefill that are queued.
    """

    token_s: float
    seat_s: float
    crowding_s: float
    unused: float
    free: float
    queue_s: float


class Crowd(NamedTuple):
    """How it is at the replicas that can be chosen, together.

    Attributes:
        queue_s: Seconds of prefill that are queued.
        replicas: How many they are.
        room: Sum of 1 / (1 + how many wait there).
        rate: Ids that they prefill in a second.
    """

    queue_s: float
    replicas: float
    room: float
    rate: float

    @property
    def congestion(self) -> float:
        """How full they are: 1 while nobody waits, 1 + n where n wait at every replica.

        The harmonic mean of 1 + n. Where a share s of the replicas is idle it stays below 1/s,
        however long the other queues are: an idle replica computes a miss at nobody's cost, so a
        hot prefix can't pin itself to its home by the queue that it makes there.
        """
        return self.replicas / self.room

    @property
    def token_s(self) -> float:
        """Seconds of an id on the average replica: a slow one's second delays fewer."""
        return self.replicas / self.rate


def terms(standing: Standing, rate: float, step_s: float, shape: Shape = SHAPE) -> Terms:
    """Return the terms of a replica that prefills `rate` ids a second and decodes in `step_s`."""
    seats = max(1, standing.max_running)
    requests = standing.running + standing.waiting
    beyond = max(0, requests + 1 - seats)
    occupancy = requests / seats
    token_s = 1 / rate
    if standing.step_tokens and standing.running:
        # Those who decode take part in every step of a prefill.
        token_s += step_s / standing.step_tokens
    return Terms(
        token_s=token_s,
        seat_s=beyond * step_s / seats,
        # Decoding is bound by memory: company is nearly free until the batch is well filled.
        crowding_s=shape.crowding * step_s * occupancy * occupancy,
        unused=max(0, standing.free_blocks - standing.cached_blocks),
        free=standing.free_blocks,
        queue_s=standing.uncached_tokens * token_s,
    )


def expected_output(max_tokens: int) -> int:
    """Return how many ids an output will probably have."""
    return max(1, min(max_tokens, EXPECTED_OUTPUT))


def alpha_at(crowd: float, shape: Shape = SHAPE) -> float:
    """Weight of an id that is computed though another replica holds it.

    Such an id delays those who come after it for as long as the queue lasts. In a queue of
    Poisson arrivals that is 1 + (how many wait) / (1 - utilization) requests: more than in
    proportion to 1 + n. It levels off as queues get very long.
    """
    above = shape.idle * (crowd**shape.power - 1)
    room = shape.full - shape.idle
    return shape.idle + (room * above / (room + above) if room > 0 else 0.0)


def regretted_ids(held: Floats) -> Floats:
    """Ids that each replica lacks though others hold them, by how many others do.

    What one other replica holds counts whole, what k others hold counts 1/k: a prefix that is
    in many places has shown that it is wanted in many, so one more copy is less of a loss.
    What nobody holds has to be computed wherever it goes, and counts nothing.
    """
    order = (-held).argsort()
    depth = held[order]
    lost = np.zeros(len(held))
    lost[order[1:]] = ((depth[:-1] - depth[1:]) / np.arange(1, len(held))).cumsum()
    return lost


def lost_s(
    held: Floats, prompt_tokens: int, crowd: Crowd, lanes: Floats, shape: Shape = SHAPE
) -> Floats:
    """Return what others lose when a prompt goes to each replica, in seconds.

    Args:
        held: Ids of the prompt that each holds; none where one can't be chosen.
        prompt_tokens: Ids of the prompt.
        crowd: Of those that can be chosen, at least one.
        lanes: Where each stands in the order of lanes, from 0 towards 1.
        shape: The constants.
    """
    weight, most = alpha_at(crowd.congestion, shape), float(held.max())
    own_s = max(1.0, prompt_tokens - most) * crowd.token_s
    long_s = lane_s(own_s, shape.long * crowd.queue_s / crowd.replicas)
    lost = shape.lane * (1 - 1 / crowd.congestion) ** _CROWDED * long_s * lanes
    if most:
        lost = lost + (weight - 1) * crowd.token_s * regretted_ids(held)
    return lost


def lane_s(own_s: float, long_s: float) -> float:
    """Seconds of work that short requests should not stand behind: that of a long one.

    Long is what takes longer than `long_s`, a part of the usual queue. By waiting in a longer
    queue it adds little to its own time; in a short one it makes everybody's much longer. So
    long work that keeps together delays fewer than long work in every queue.
    """
    if long_s <= own_s:
        return own_s / (1 + (long_s / own_s) ** _STEEP)
    ratio = (own_s / long_s) ** _STEEP
    return own_s * ratio / (1 + ratio)


def evicted_blocks(needed: Floats, unused: Floats, free: Floats, shape: Shape = SHAPE) -> Floats:
    """Blocks that must go for so many new ones, by the chance that somebody misses them."""
    cached: Floats = shape.reuse * np.maximum(0.0, needed - unused)
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
        near = (excess < _NEVER_DRAWN).nonzero()[0]
        if len(near) == 1:
            return int(rows[near[0]])
        weights = [math.exp(-each) for each in excess[near].tolist()]
        return int(rows[rng.choices(near.tolist(), weights)[0]])
