"""The fleet as people see it: one row per replica. Data only."""

import enum
from dataclasses import dataclass

from router.policy.choice import View


class Phase(enum.IntEnum):
    """Whether a replica gets requests; values of router.v1.ReplicaPhase."""

    CONNECTING = 1
    READY = 2
    DRAINING = 3
    DOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as this router sees it.

    Attributes:
        running, waiting: Requests there, of all routers.
        in_flight: Requests of this router there.
        routed: Requests sent there since this router started.
        prompt_tokens, cached_tokens: Ids that those brought (prompts, and of resumed outputs
            what was generated before), and how many of them were reused.
        reason: Why it gets no new requests, for people; empty when it does.
    """

    group_id: str
    address: str
    dp_rank: int
    model: str
    incarnation: int
    phase: Phase
    view: View
    running: int
    waiting: int
    in_flight: int
    cached_blocks: int
    kv_blocks: int
    free_blocks: int
    block_tokens: int
    routed: int
    prompt_tokens: int
    cached_tokens: int
    prefill_rate: float
    topology: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePrice:
    """What a request would cost at one replica, in seconds, and why.

    Attributes:
        eligible: Whether it can be chosen now.
        reason: Why not, for people; for one that could be and is not chosen, what speaks
            against it; empty for the chosen one.
        chosen: Whether the policy would send the request there.
        prompt_blocks: Whole blocks of the prompt there.
        held_blocks: Leading ones of them in its cache, as far as this router knows.
        matched_blocks: The same with those that are about to be there.
        running, waiting: Requests there, of all routers.
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
    chosen: bool = False
    phase: Phase
    view: View
    block_tokens: int
    prompt_blocks: int
    held_blocks: int
    matched_blocks: int
    running: int
    waiting: int
    wait_s: float
    prefill_s: float
    alpha: float
    crowding_s: float
    eviction_s: float
    total_s: float
