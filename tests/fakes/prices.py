"""A price of one replica, of which a test gives only what it looks at."""

from dataclasses import replace

from router.fleet.views import CandidatePrice, Phase
from router.policy.choice import View

_FREE = CandidatePrice(
    group_id="",
    dp_rank=0,
    eligible=True,
    reason="",
    phase=Phase.READY,
    view=View.EXACT,
    block_tokens=16,
    prompt_blocks=0,
    held_blocks=0,
    matched_blocks=0,
    running=0,
    waiting=0,
    wait_s=0.0,
    prefill_s=0.0,
    alpha=2.0,
    crowding_s=0.0,
    eviction_s=0.0,
    total_s=0.0,
)


def candidate_price(group_id: str, dp_rank: int = 0, **parts: object) -> CandidatePrice:
    """Return a price with these parts, otherwise that of an idle replica that holds nothing."""
    return replace(_FREE, group_id=group_id, dp_rank=dp_rank, **parts)  # type: ignore[arg-type]
