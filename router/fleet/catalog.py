"""What groups serve, and replicas as rows for people. Reads groups; changes nothing."""

from collections.abc import Collection, Iterable, Sequence

from radixmesh.errors import ModelNotServed, NoReplicaReady
from router.fleet.ask import ModelInfo
from router.fleet.group import Group
from router.fleet.replica import Replica
from router.fleet.views import Phase, ReplicaView
from router.policy.choice import View


def serving(groups: Collection[Group], model: str) -> list[Group]:
    """Return the groups of a model; an empty name means the only one.

    A group that is away still counts as serving what it last said.

    Raises:
        ModelNotServed: No group serves it.
        NoReplicaReady: There is no group, or some group has not said yet what it serves.
    """
    if not groups:
        raise NoReplicaReady("this router has no worker group")
    names = {group.info.model for group in groups if group.info}
    name = next(iter(names)) if not model and len(names) == 1 else model
    found = [group for group in groups if group.info and group.info.model == name]
    if found:
        return found
    if any(group.info is None for group in groups):
        raise NoReplicaReady("some worker groups have not answered yet")
    raise ModelNotServed(f"no worker group serves {model!r}")


def ready_replicas(groups: Collection[Group], now: float) -> list[Replica]:
    """Return the replicas that get requests."""
    return [
        replica
        for group in groups
        for replica in group.replicas.values()
        if replica.phase(now) is Phase.READY
    ]


def model_info(groups: Sequence[Group], now: float) -> ModelInfo:
    """Return what the model takes that these groups serve; at least one has said what it is."""
    infos = [group.info for group in groups if group.info]
    return ModelInfo(
        name=infos[0].model,
        max_model_len=min(info.max_model_len for info in infos),
        fingerprint=infos[0].fingerprint,
        ready_replicas=len(ready_replicas(groups, now)),
        vocab_size=min(info.vocab_size for info in infos),
        eos_ids=infos[0].eos_ids,
    )


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
    load, phase = replica.workload.at(now), replica.phase(now)
    return ReplicaView(
        group_id=group.group_id,
        address=group.address,
        dp_rank=dp_rank,
        model=info.model if info else "",
        incarnation=replica.incarnation,
        phase=phase,
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
        reason=group.withheld or ("" if phase is Phase.READY else phase.name.lower()),
    )
