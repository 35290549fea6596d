"""One request of a replay, and a set of them with the fleet it is meant for. Data only."""

from collections.abc import Sequence
from dataclasses import dataclass


class ReplayError(ValueError):
    """What was asked for can't be replayed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request.

    Attributes:
        at: When it arrives, in seconds.
        keys: Block keys of its whole blocks, the first block's first; never 0.
        tokens: Ids of its prompt.
        output: Ids that it generates.
        tail: Keys of the blocks that prompt and output fill together, after `keys`.
        session: What a client would call its conversation.
        shared: Leading blocks that a burst of siblings has in common; 0 for all others.
    """

    at: float
    keys: Sequence[int]
    tokens: int
    output: int = 1
    tail: Sequence[int] = ()
    session: str = ""
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Requests in order of arrival, and the fleet that they are meant for.

    Attributes:
        name: For tables.
        jobs: In order of arrival.
        block_tokens: Ids of a block.
        cache_tokens: Ids that the KV cache of a replica holds.
        load: Share of the fleet's prefill capacity that they need with an endless shared cache.
        replicas: How many replicas serve them.
        speeds: Relative pace of each replica, by its index modulo their number.
    """

    name: str
    jobs: Sequence[Job]
    block_tokens: int
    cache_tokens: int
    load: float = 0.7
    replicas: int = 8
    speeds: Sequence[float] = (1.0,)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.jobs[-1].at - self.jobs[0].at

    def speed(self, replica: int) -> float:
        """Relative pace of a replica."""
        return self.speeds[replica % len(self.speeds)]


def reusable_blocks(job: Job, block_tokens: int) -> int:
    """Whole blocks that a cache can spare it: one id at least is always computed."""
    return min(len(job.keys), (job.tokens - 1) // block_tokens)


def ceiling_tokens(scenario: Scenario) -> int:
    """Prompt ids that one endless cache, shared by all and filled at once, would spare."""
    seen: set[int] = set()
    spared = 0
    for job in scenario.jobs:
        depth = 0
        for key in job.keys:
            if key not in seen:
                break
            depth += 1
        spared += min(depth, reusable_blocks(job, scenario.block_tokens)) * scenario.block_tokens
        seen.update(job.keys, job.tail)
    return spared


def prefill_rate(scenario: Scenario, *, load: float, replicas: int) -> float:
    """Ids a second of a replica of speed 1 at which the scenario is a load of `load`.

    Arrivals stay as they are. Decoding is not part of the load.

    Raises:
        ReplayError: The scenario has no length, or the load is not above 0.
    """
    if scenario.span_s <= 0 or load <= 0:
        raise ReplayError("a load needs requests over some time, and must be above 0")
    needed = sum(job.tokens for job in scenario.jobs) - ceiling_tokens(scenario)
    speeds = sum(scenario.speed(number) for number in range(replicas))
    return needed / (load * speeds * scenario.span_s)
