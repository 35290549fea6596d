"""What a policy sees and what it answers. Data only: no wire, no clock, no state of the fleet."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
Bools = NDArray[np.bool_]

# (group_id, dp_rank) of a replica.
Name = tuple[str, int]


class View(enum.IntEnum):
    """How far the picture of a replica's cache is trusted; values of router.v1.ViewState."""

    EXACT = 1
    DEGRADED = 2
    BLIND = 3


# Made anew at every change of a replica's load: freezing it costs twice.
@dataclass(slots=True, kw_only=True)
class Standing:
    """How a replica stands, whatever is asked of it.

    Attributes:
        reason: Why it can't be chosen, for people; empty when it can.
        view: How far the picture of its cache is trusted.
        block_tokens: Ids of a block there.
        running: Requests in its batch.
        waiting: Requests queued there, booked ones that it hasn't seen included.
        uncached_tokens: Prompt ids that it still has to compute for all of these.
        free_blocks: Blocks that are free or can be evicted at once.
        cached_blocks: Blocks of its prefix cache.
        kv_blocks: Blocks of its KV cache.
        max_running: Requests in one step.
        step_tokens: Ids computed in one step; 0 when not known.
        prefill_rate: Prompt ids a second; 0 when not learned yet.
        decode_step_s: Seconds of a step without prefill; 0 when not learned yet.
    """

    reason: str = ""
    view: View = View.EXACT
    block_tokens: int = 16
    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    kv_blocks: int = 0
    max_running: int = 1
    step_tokens: int = 0
    prefill_rate: float = 0.0
    decode_step_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a policy knows of the request.

    Attributes:
        prompt_tokens: Ids of the prompt.
        max_tokens: Output ids that may still come.
        session: What the client calls its conversation; empty when it gave nothing.
    """

    prompt_tokens: int
    max_tokens: int = 1
    session: str = ""


@dataclass(slots=True, kw_only=True)
class Prices:
    """What a request would cost at each replica: columns with one value per replica, in seconds.

    Attributes:
        names: Who they are.
        standings: How they stand.
        eligible: Whether they can be chosen now.
        block_tokens: Ids of a block there.
        matched_blocks: Blocks of the prompt that each holds or is about to hold.
        alpha: Weight of `prefill_s` there: what others lose by it comes on top of it.
        wait_s: For the work that is there.
        prefill_s: To compute what is missing, before alpha.
        crowding_s: What decoding next to the others costs.
        eviction_s: What the blocks that must go would cost to compute again.
        total_s: The price.
        requests: Requests that run and wait there.
    """

    names: Sequence[Name]
    standings: Sequence[Standing]
    eligible: Bools
    block_tokens: Floats
    matched_blocks: Floats
    alpha: Floats
    wait_s: Floats
    prefill_s: Floats
    crowding_s: Floats
    eviction_s: Floats
    total_s: Floats
    requests: Floats


class Policy(Protocol):
    """Chooses one of several replicas. May remember its own choices, nothing else."""

    @property
    def name(self) -> str:
        """What `--policy` and receipts call it."""
        ...

    def choose(self, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Return one of `rows`, the replicas that may be chosen: at least one."""
        ...
