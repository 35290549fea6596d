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
