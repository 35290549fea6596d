"""Requests made by chance from a seed: workloads that a fleet may meet, by name.

Each is made so that its shape holds whatever the pace of the fleet, which the load sets.
`hostile.py` has those that are made to hurt a policy.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Final

from bench.replay import hostile
from bench.replay.job import Job, ReplayError, Scenario
from bench.replay.making import BLOCK, arrivals, fresh, scenario, zipf


def shared_prefixes(seed: int) -> Scenario:
    """200 groups that share 1 500 ids each, 150 ids of their own; a group's turns are mixed in."""
    rng, keys = Random(seed), count(1)
    heads = [fresh(keys, 23) for _ in range(200)]
    order = [group for group in range(200) for _ in range(16)]
    rng.shuffle(order)
    jobs = [
        Job(
            at=at,
            keys=(*heads[group], *fresh(keys, 2)),
            tokens=25 * BLOCK + 22,
            output=rng.randrange(8, 100),
            session=f"group {group}",
        )
        for at, group in zip(arrivals(rng, 130.0), order, strict=False)
    ]
    return scenario("shared_prefixes", jobs, cache_tokens=100_000, load=0.7)


def chat(seed: int) -> Scenario:
    """500 conversations of 3 to 10 turns; each turn brings all that was said before."""
    rng, keys = Random(seed), count(1)
    system = fresh(keys, 4)
    jobs: list[Job] = []
    for number, began in zip(range(500), arrivals(rng, 8.0), strict=False):
        jobs.extend(_conversation(rng, keys, f"chat {number}", began, system))
    return scenario("chat", jobs, cache_tokens=600_000, load=0.7)


def _conversation(
    rng: Random, keys: Iterator[int], session: str, at: float, said: Sequence[int]
) -> Iterator[Job]:
    for _ in range(rng.randrange(3, 11)):
        said = (*said, *fresh(keys, rng.choice((4, 8, 16, 32, 128))))
        answer = fresh(keys, rng.randrange(1, 6))
        yield Job(
            at=at,
            keys=said,
            tokens=len(said) * BLOCK + 10,
            output=len(answer) * BLOCK,
            tail=answer,
            session=session,
        )
        said = (*said, *answer)
        at += 8.0 + rng.expovariate(1 / 10)


def siblings(seed: int) -> Scenario:
    """Bursts of 16 that arrive at once and share 6 000 ids, over a background of single prompts."""
    rng, keys = Random(seed), count(1)
    jobs: list[Job] = []
    for at in (each for each, _ in zip(arrivals(rng, 1.0), range(60), strict=False)):
        head = fresh(keys, 94)
        jobs.extend(
            Job(
                at=at,
                keys=(*head, *fresh(keys, 8)),
                tokens=102 * BLOCK + 5,
                output=32,
                shared=len(head),
            )
            for _ in range(16)
        )
    jobs.extend(single(rng, keys, at, 30) for at in _until(arrivals(rng, 8.0), jobs[-1].at))
    return scenario("siblings", jobs, cache_tokens=250_000, load=0.6)


def zipf_prefixes(seed: int) -> Scenario:
    """1 000 long prompts of unequal fame: the first of them gets a seventh of all requests."""
    rng, keys = Random(seed), count(1)
    heads = [fresh(keys, rng.randrange(8, 64)) for _ in range(1000)]
    jobs = []
    for at, which in zip(arrivals(rng, 50.0), zipf(rng, 1000, 3000), strict=False):
        own = rng.randrange(1, 12)
        jobs.append(
            Job(
                at=at,
                keys=(*heads[which], *fresh(keys, own)),
                tokens=(len(heads[which]) + own) * BLOCK + 7,
                output=rng.randrange(16, 128),
                session=f"prompt {which}",
            )
        )
    return scenario("zipf_prefixes", jobs, cache_tokens=300_000, load=0.75)


def unequal_groups(seed: int) -> Scenario:
    """Shared prefixes on replicas of which half are three times as fast as the others."""
    made = zipf_prefixes(seed)
    return scenario("unequal_groups", made.jobs, cache_tokens=300_000, load=0.7, speeds=(3.0, 1.0))


def slow_replica(seed: int) -> Scenario:
    """Conversations on a fleet of which one replica runs at a fifth of the others' pace."""
    made = chat(seed)
    speeds = (0.2, *[1.0] * 7)
    return scenario("slow_replica", made.jobs, cache_tokens=600_000, load=0.65, speeds=speeds)


def unique(seed: int) -> Scenario:
    """Prompts that share nothing: only load matters."""
    rng, keys = Random(seed), count(1)
    jobs = [
        single(rng, keys, at, rng.choice((4, 8, 16, 64)))
        for at in (each for each, _ in zip(arrivals(rng, 30.0), range(2500), strict=False))
    ]
    return scenario("unique", jobs, cache_tokens=200_000, load=0.75)


def single(rng: Random, keys: Iterator[int], at: float, blocks: int) -> Job:
    """Return a request that shares nothing with any other."""
    return Job(
        at=at,
        keys=fresh(keys, blocks),
        tokens=blocks * BLOCK + 11,
        output=rng.randrange(16, 200),
    )


def _until(instants: Iterator[float], end: float) -> Iterator[float]:
    for instant in instants:
        if instant > end:
            return
        yield instant


WORKLOADS: Final[Mapping[str, Callable[[int], Scenario]]] = MappingProxyType(
    {
        made.__name__: made
        for made in (
            shared_prefixes,
            chat,
            siblings,
            zipf_prefixes,
            unique,
            unequal_groups,
            slow_replica,
            *hostile.ALL,
        )
    }
)


def make(name: str, seed: int) -> Scenario:
    """Make a workload.

    Raises:
        ReplayError: There is none of this name.
    """
    if name not in WORKLOADS:
        raise ReplayError(f"no workload is called {name!r}; there are {', '.join(WORKLOADS)}")
    return WORKLOADS[name](seed)
