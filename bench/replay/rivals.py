"""Policies that exist for comparison only, and those of the router as a replay calls them.

Each says what it restates and where it is better off here than its original: all of them
see the loads that our workers report, and those that look at caches see our exact index.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Final

from bench.replay.job import Job, ReplayError
from bench.replay.router import Chooser
from router.policy.choice import Floats, Ints, Policy, Prices, Wish
from router.policy.policies import POLICIES


class Live:
    """A policy of the router, which doesn't look at keys."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def pick(self, job: Job, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Let it choose."""
        del job
        return self._policy.choose(prices, rows, wish, rng)


class QueuePlusMiss:
    """min(queue + own miss), in seconds: Mooncake's algorithm 1, and Dynamo's with its defaults.

    Better off than both: in-flight prefixes, and loads that all routers share.
    """

    def pick(self, job: Job, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Take the least; chance decides among equals."""
        del job, wish
        return least(prices.wait_s + prices.prefill_s, rows, rng)


class Dynamo:
    """Dynamo's cost with overlap weight 1: blocks to prefill, queued and own, plus blocks in use.

    In blocks and not in seconds, so replicas of unequal pace look alike. Better off than
    the original, whose routers know of no other's load unless told to share it.
    """

    def pick(self, job: Job, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Take the least; chance decides among equals."""
        del job
        costs = prices.total_s * 0
        for row, stands in enumerate(prices.standings):
            missing = wish.prompt_tokens / stands.block_tokens - prices.matched_blocks[row]
            queued = stands.uncached_tokens / stands.block_tokens
            costs[row] = queued + missing + stands.kv_blocks - stands.free_blocks
        return least(costs, rows, rng)


class ApproximateTree:
    """SGLang's router: a tree of what was sent where, a threshold, a gate by load.

    Unbalanced (most minus fewest requests above 64, and the most above 1.5 times the fewest):
    the least loaded. Else the worker with the longest match, if that covers more than 0.3 of the
    prompt; otherwise the one with the smallest tree, or, with `by_load`, the least loaded. The
    choice is put into the tree in any case. Each worker's part is bounded, oldest leaves first.
    Better off than the original: blocks of ids and not characters, and loads of all routers.
    """

    def __init__(self, *, by_load: bool = False, blocks_limit: int = 1 << 16) -> None:
        self._by_load = by_load
        self._limit = blocks_limit
        self._trees: dict[int, OrderedDict[int, None]] = {}

    def pick(self, job: Job, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Choose by gate and threshold, and remember it."""
        del wish
        row = self._choose(job, prices, rows, rng)
        tree = self._trees[row]
        for key in reversed(job.keys):
            tree[key] = None
            tree.move_to_end(key)
        while len(tree) > self._limit:
            tree.popitem(last=False)
        return row

    def _choose(self, job: Job, prices: Prices, rows: Ints, rng: Random) -> int:
        loads = prices.requests[rows]
        fewest, most = float(loads.min()), float(loads.max())
        if most - fewest > 64 and most > 1.5 * fewest:
            self._at_least(rows)
            return least(prices.requests, rows, rng)
        self._at_least(rows)
        every: list[int] = rows.tolist()
        depths = {row: _depth(self._trees[row], job) for row in every}
        best = max(depths, key=lambda row: depths[row])
        if depths[best] > 0.3 * max(1, len(job.keys)):
            return best
        if self._by_load:
            return least(prices.requests, rows, rng)
        return min(depths, key=lambda row: len(self._trees[row]))

    def _at_least(self, rows: Ints) -> None:
        for row in rows.tolist():
            self._trees.setdefault(row, OrderedDict())


def _depth(tree: OrderedDict[int, None], job: Job) -> int:
    depth = 0
    for key in job.keys:
        if key not in tree:
            break
        depth += 1
    return depth


def least(costs: Floats, rows: Ints, rng: Random) -> int:
    """Return a row of the least cost; chance decides among equals."""
    found = costs[rows]
    equal: list[int] = rows[found <= found.min() + 1e-12].tolist()
    return rng.choice(equal)


_RIVALS: Final[Mapping[str, Callable[[], Chooser]]] = MappingProxyType(
    {
        "queue_plus_miss": QueuePlusMiss,
        "dynamo": Dynamo,
        "sglang": ApproximateTree,
        "smg": lambda: ApproximateTree(by_load=True),
    }
)
NAMES: Final = (*POLICIES, *_RIVALS)


def chooser(name: str) -> Callable[[], Chooser]:
    """Return what makes a policy, one for each router.

    Raises:
        ReplayError: There is none of this name.
    """
    if name in _RIVALS:
        return _RIVALS[name]
    if name not in POLICIES:
        raise ReplayError(f"no policy is called {name!r}; there are {', '.join(NAMES)}")
    return lambda: Live(POLICIES[name]())
