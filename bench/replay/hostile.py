"""Workloads that are made to hurt: each is the worst that we know for some way to choose."""

from collections.abc import Callable
from itertools import count
from random import Random
from typing import Final

from bench.replay.job import Job, Scenario
from bench.replay.making import BLOCK, arrivals, fresh, scenario


def one_root(seed: int) -> Scenario:
    """All share one long block run and nothing else: the longest match says nothing."""
    rng, keys = Random(seed), count(1)
    root = fresh(keys, 8)
    jobs = []
    for at, _ in zip(arrivals(rng, 40.0), range(2500), strict=False):
        own = rng.randrange(4, 40)
        jobs.append(
            Job(
                at=at,
                keys=(*root, *fresh(keys, own)),
                tokens=(8 + own) * BLOCK + 3,
                output=rng.randrange(16, 128),
                session="root",
            )
        )
    return scenario("one_root", jobs, cache_tokens=200_000, load=0.8)


def alternating_sets(seed: int) -> Scenario:
    """Two hot sets in turn, each larger than one cache and smaller than the fleet's."""
    rng, keys = Random(seed), count(1)
    sets = [[fresh(keys, 40) for _ in range(160)] for _ in range(2)]
    jobs = []
    for at, number in zip(arrivals(rng, 80.0), range(3000), strict=False):
        which = number // 500 % 2
        one = rng.randrange(160)
        own = rng.randrange(1, 6)
        jobs.append(
            Job(
                at=at,
                keys=(*sets[which][one], *fresh(keys, own)),
                tokens=(40 + own) * BLOCK + 9,
                output=rng.randrange(8, 64),
                session=f"{which}/{one}",
            )
        )
    return scenario("alternating_sets", jobs, cache_tokens=200_000, load=0.7)


def long_and_short(seed: int) -> Scenario:
    """One in twenty prompts is a hundred times as long as the others, which share prefixes."""
    rng, keys = Random(seed), count(1)
    heads = [fresh(keys, 4) for _ in range(40)]
    jobs = []
    for at, _ in zip(arrivals(rng, 30.0), range(3000), strict=False):
        which = rng.randrange(40)
        long = rng.random() < 0.05
        own = rng.randrange(300, 500) if long else rng.randrange(1, 6)
        jobs.append(
            Job(
                at=at,
                keys=(*heads[which], *fresh(keys, own)),
                tokens=(4 + own) * BLOCK + 1,
                output=rng.randrange(16, 96),
                session=f"head {which}",
            )
        )
    return scenario("long_and_short", jobs, cache_tokens=400_000, load=0.7)


def scan(seed: int) -> Scenario:
    """Documents read once flow through caches that a set of shared prompts would fill."""
    rng, keys = Random(seed), count(1)
    heads = [fresh(keys, 60) for _ in range(120)]
    jobs = []
    for at, _ in zip(arrivals(rng, 15.0), range(3000), strict=False):
        which = rng.randrange(120)
        if rng.random() < 0.35:
            chain, session = fresh(keys, rng.randrange(80, 200)), ""
        else:
            chain = (*heads[which], *fresh(keys, rng.randrange(1, 5)))
            session = f"head {which}"
        jobs.append(
            Job(
                at=at,
                keys=chain,
                tokens=len(chain) * BLOCK + 2,
                output=rng.randrange(8, 64),
                session=session,
            )
        )
    return scenario("scan", jobs, cache_tokens=120_000, load=0.75)


def hot_prefix(seed: int) -> Scenario:
    """Four of five requests share one long prefix; the rest have homes of their own."""
    rng, keys = Random(seed), count(1)
    hot, heads = fresh(keys, 64), [fresh(keys, 32) for _ in range(100)]
    jobs = []
    for at, _ in zip(arrivals(rng, 100.0), range(3000), strict=False):
        which = rng.randrange(100)
        popular = rng.random() < 0.8
        own = rng.randrange(2, 10)
        head = hot if popular else heads[which]
        jobs.append(
            Job(
                at=at,
                keys=(*head, *fresh(keys, own)),
                tokens=(len(head) + own) * BLOCK + 8,
                output=rng.randrange(16, 96),
                session="hot" if popular else f"head {which}",
            )
        )
    return scenario("hot_prefix", jobs, cache_tokens=150_000, load=0.8)


ALL: Final[tuple[Callable[[int], Scenario], ...]] = (
    one_root,
    alternating_sets,
    long_and_short,
    scan,
    hot_prefix,
)
