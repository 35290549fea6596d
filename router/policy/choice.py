"""What a policy sees and what it answers. Data only: no wire, no clock, no state of the fleet."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol


class View(enum.IntEnum):
    """How far the picture of a replica's cache is trusted; values of router.v1.ViewState."""

    EXACT = 1
    DEGRADED = 2
    BLIND = 3


# Candidates and prices are made for every replica in every choice: freezing them costs twice.
@dataclass(slots=True, kw_only=True)
class Candidate:
    """One replica, as it is at the moment of choice.

    Attributes:
        reason: Why it can't be chosen, for people; empty when it can.
        prompt_tokens: Ids of the prompt.
        prompt_blocks: Whole blocks of the prompt there.
        matched_blocks: Those of them that it holds or is about to hold.
        running: Requests in its batch.
        waiting: Requests queued there, booked ones that it hasn't seen included.
        uncached_tokens: Prompt ids that it still has to compute for all of these.
        free_blocks: Blocks that are free or can be evicted at once.
        cached_blocks: Blocks of its prefix cache.
        prefill_rate: Prompt ids a second; 0 when not learned yet.
        decode_step_s: Seconds of a step without prefill; 0 when not learned yet.
    """

    group_id: str
    dp_rank: int
    reason: str = ""
    view: View = View.EXACT
    block_tokens: int = 16
    prompt_tokens: int = 0
    prompt_blocks: int = 0
    matched_blocks: int = 0
    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    kv_blocks: int = 0
    max_running: int = 1
    prefill_rate: float = 0.0
    decode_step_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class CandidatePrice:
    """What a request would cost at one replica, in seconds.

    Attributes:
        eligible: Whether it can be chosen now.
        reason: Why not, for people; empty when eligible.
        matched_blocks: Blocks of the prompt that it holds or is about to hold.
        wait_s: For the work that is there.
        prefill_s: To compute what is missing, before alpha.
        alpha: Weight of `prefill_s` at the present load.
        crowding_s: What decoding next to the others costs.
        eviction_s: What the blocks that must go would cost to compute again.
        total_s: The price.
    """

    group_id: str
    dp_rank: int
    eligible: bool
    reason: str
    view: View
    prompt_blocks: int
    matched_blocks: int
    wait_s: float
    prefill_s: float
    alpha: float
    crowding_s: float
    eviction_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The replica that a policy chose, its price, and the policy's name."""

    price: CandidatePrice
    policy: str


class Policy(Protocol):
    """Chooses one of several replicas. May remember its own choices, nothing else."""

    @property
    def name(self) -> str:
        """What `--policy` and receipts call it."""
        ...

    def choose(self, prices: Sequence[CandidatePrice], rng: Random) -> Choice:
        """Choose one of `prices`: all eligible, at least one."""
        ...
