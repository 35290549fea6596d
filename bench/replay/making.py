"""What workloads are made of: arrivals, keys, fame. Chance comes from the caller's generator."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from random import Random

from bench.replay.job import Job, Scenario

BLOCK = 64  # ids


def arrivals(rng: Random, per_s: float) -> Iterator[float]:
    """Iterate over instants of a Poisson process."""
    at = 0.0
    while True:
        at += rng.expovariate(per_s)
        yield at


def fresh(keys: Iterator[int], blocks: int) -> tuple[int, ...]:
    """Return keys that nobody has had."""
    return tuple(islice(keys, blocks))


def zipf(rng: Random, kinds: int, draws: int, *, power: float = 1.0) -> Iterator[int]:
    """Draw kinds of which the n-th has a chance of 1 / n^power."""
    ends = list(accumulate(1 / rank**power for rank in range(1, kinds + 1)))
    for _ in range(draws):
        yield bisect_left(ends, rng.random() * ends[-1])


def scenario(
    name: str,
    jobs: Sequence[Job],
    *,
    cache_tokens: int,
    load: float,
    speeds: Sequence[float] = (1.0,),
) -> Scenario:
    """Return a scenario of eight replicas with its jobs in order of arrival."""
    return Scenario(
        name=name,
        jobs=sorted(jobs, key=lambda job: job.at),
        block_tokens=BLOCK,
        cache_tokens=cache_tokens,
        load=load,
        speeds=speeds,
    )
