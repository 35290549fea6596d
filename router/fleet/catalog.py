"""What groups serve, and replicas as rows for people. Reads groups; changes nothing."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from router.fleet.group import Group
from router.fleet.views import CandidatePrice, Phase, ReplicaView
from router.policy.choice import View
from router.policy.price import Price


def explained(
    quotes: Sequence[CandidatePrice], chosen: int | None, policy: str
) -> list[CandidatePrice]:
    """Return quotes in order of price, the chosen one first, those that can't take it last.

    Args:
        quotes: Of all replicas.
        chosen: Which of them the policy would take.
        policy: Its name, for those that ignore prices.
    """
    best = None if chosen is None else quotes[chosen]
    rows = [
        replace(each, chosen=True)
        if each is best
        else replace(each, reason=_against(each, best, policy))
        for each in quotes
    ]
    return sorted(rows, key=lambda each: (not each.chosen, not each.eligible, each.total_s))


def count(groups: Iterable[Group], phase: Phase, view: View, now: float) -> int:
    """Return how many replicas are in a phase and have a view of this kind."""
    return sum(
        (replica.phase(now), replica.feed.view) == (phase, view)
        for group in groups
        for replica in list(group.replicas.values())
    )


def replica_view(group: Group, dp_rank: int, now: float) -> ReplicaView:
    """Return the row of one replica."""
    replica, info = group.replicas[dp_rank], group.info
    load = replica.workload.at(now)
    return ReplicaView(
        group_id=group.group_id,
        address=group.address,
        dp_rank=dp_rank,
        model=info.model if info else "",
        incarnation=replica.incarnation,
        phase=replica.phase(now),
        view=replica.feed.view,
        running=load.running,
        waiting=load.waiting,
        in_flight=replica.in_flight,
        cached_blocks=replica.feed.block_count,
        kv_blocks=info.kv_blocks if info else 0,
        free_blocks=load.free_blocks,
        block_tokens=info.block_tokens if info else 0,
        routed=replica.counters.routed,
        prompt_tokens=replica.counters.prompt_tokens,
        cached_tokens=replica.counters.cached_tokens,
        prefill_rate=load.prefill_rate,
        topology=info.topology if info else "",
        reason=replica.unfit(now),
    )


def _against(quote: CandidatePrice, best: CandidatePrice | None, policy: str) -> str:
    """Why a replica is not the chosen one."""
    if quote.reason or best is None or quote is best:
        return quote.reason
    if policy != Price.name:
        return f"{policy} chose another"
    if quote.total_s <= best.total_s:
        return "nearly equal: by chance, or by what is hinted or avoided"
    return f"{quote.total_s - best.total_s:.3f} s dearer"
