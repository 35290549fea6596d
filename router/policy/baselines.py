"""Policies that users know from elsewhere. Each says what it looks at and what it ignores."""

from random import Random

import numpy as np
import xxhash

from router.policy.choice import Floats, Ints, Name, Prices, Wish


class RoundRobin:
    """Each replica in turn, in order of name. Replicas that come and go don't reset the turn.

    Ignores caches and load.
    """

    name = "round_robin"

    def __init__(self) -> None:
        self._last: Name = ("", -1)

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Choose the first one after the last choice, or the first of all."""
        del wish, rng
        every: list[int] = rows.tolist()
        ordered = sorted((prices.names[row], row) for row in every)
        self._last, row = next((each for each in ordered if each[0] > self._last), ordered[0])
        return row


class Uniform:
    """Any replica, with equal chance. Ignores caches and load."""

    name = "random"

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Draw one."""
        del prices, wish
        every: list[int] = rows.tolist()
        return rng.choice(every)


class LeastLoad:
    """The replica with the fewest requests, running and waiting. Ignores caches.

    Counts are those that replicas report, of all routers, and what was sent since.
    """

    name = "least_load"

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Choose one that has the fewest; chance decides among equals."""
        del wish
        return _least(prices.requests, rows, rng)


class PowerOfTwo:
    """Two replicas by chance, and of these the one with fewer requests. Ignores caches.

    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
    """

    name = "power_of_two"

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Draw two, choose one."""
        del wish
        drawn = rng.sample(rows.tolist(), min(2, len(rows)))
        return _least(prices.requests, np.array(drawn), rng)


class CacheAware:
    """The gate of SGLang's router: affinity above a threshold, else load. Here on exact caches.

    When the loads are unbalanced (the difference between most and fewest requests is above
    `balance_abs`, and the most above `balance_rel` times the fewest) it takes the least loaded.
    Else it takes the longest match if that covers more than `threshold` of the prompt, and
    otherwise the least loaded. The original guesses caches from its own routing, by characters,
    and sends what matches nowhere to the smallest tree; both are worse and not imitated.
    """

    name = "cache_aware"

    def __init__(
        self, *, threshold: float = 0.3, balance_abs: float = 64, balance_rel: float = 1.5
    ) -> None:
        self._threshold = threshold
        self._balance_abs = balance_abs
        self._balance_rel = balance_rel

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Choose by the gate; chance decides among equals."""
        loads = prices.requests[rows]
        fewest, most = float(loads.min()), float(loads.max())
        if most - fewest > self._balance_abs and most > fewest * self._balance_rel:
            return _least(prices.requests, rows, rng)
        held = (prices.matched_blocks * prices.block_tokens)[rows]
        best = float(held.max())
        if best <= self._threshold * wish.prompt_tokens:
            return _least(prices.requests, rows, rng)
        return _least(prices.requests, rows[held == best], rng)


class ConsistentHash:
    """One replica per session, as long as it can be chosen. Ignores caches and load.

    Rendezvous hashing (Thaler and Ravishankar, 1996): when a replica goes, only its own
    sessions move; when one comes, only the sessions that it takes. What names no session goes to
    the least loaded.
    """

    name = "consistent_hash"

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Choose the replica that has the highest hash together with the session."""
        if not wish.session:
            return _least(prices.requests, rows, rng)
        seed = xxhash.xxh3_64_intdigest(wish.session.encode())
        every: list[int] = rows.tolist()
        return max(every, key=lambda row: _hash(prices.names[row], seed))


def _hash(name: Name, seed: int) -> int:
    group_id, dp_rank = name
    return xxhash.xxh3_64_intdigest(f"{dp_rank}@{group_id}".encode(), seed)


def _least(load: Floats, rows: Ints, rng: Random) -> int:
    loads = load[rows]
    least: list[int] = rows[loads == loads.min()].tolist()
    return rng.choice(least)
