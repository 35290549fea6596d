"""Turns groups and an ask into candidates. Knows block keys and namespaces; chooses nothing."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixmesh.blocks import ID_BYTES, Namespace, block_keys
from radixmesh.errors import NoReplicaReady, TokenizerMismatch
from router.fleet.ask import Ask
from router.fleet.group import Group
from router.fleet.replica import RESUMES_UNSTARTED_LIMIT, Replica
from router.fleet.views import Phase
from router.fleet.wire import GroupInfo
from router.fleet.workload import Charge, Report
from router.policy.choice import Candidate
from router.tree.meta_tree import MetaTree


@dataclass(frozen=True, slots=True)
class Site:
    """One replica, with the prompt's block keys there."""

    group: Group
    replica: Replica
    keys: Sequence[int]
    candidate: Candidate

    @property
    def name(self) -> tuple[str, int]:
        """(group_id, dp_rank)."""
        return self.candidate.group_id, self.candidate.dp_rank


class _Prompt:
    """Keys and matches of one prompt, made once for each namespace and block size."""

    def __init__(self, ask: Ask, tree: MetaTree) -> None:
        self._ask = ask
        self._tree = tree
        self._known: dict[tuple[str, str, str, int], tuple[list[int], dict[int, int]]] = {}

    def in_group(self, info: GroupInfo) -> tuple[list[int], dict[int, int]]:
        """Return the keys, and how many of them each replica number holds."""
        name = info.model, info.weight_version, info.fingerprint, info.block_tokens
        found = self._known.get(name)
        if found is None:
            keys = self._keys(info)
            found = self._known[name] = keys, self._tree.match(keys)
        return found

    def _keys(self, info: GroupInfo) -> list[int]:
        namespace = Namespace(
            model=info.model,
            weight_version=info.weight_version,
            fingerprint=info.fingerprint,
            adapter=self._ask.adapter,
            cache_salt=self._ask.cache_salt,
        )
        return block_keys(self._ask.ids, block_tokens=info.block_tokens, seed=namespace.seed())


def sites(groups: Iterable[Group], ask: Ask, tree: MetaTree, now: float) -> list[Site]:
    """Return every replica of the groups as a candidate for the ask."""
    prompt = _Prompt(ask, tree)
    tokens = len(ask.ids) // ID_BYTES
    found = []
    for group in groups:
        if group.info is None:
            continue
        keys, depths = prompt.in_group(group.info)
        loads = [replica.workload.at(now) for replica in group.replicas.values()]
        # Replicas of a group are equal machines: what the fastest has learned holds for all. A
        # lower rate comes from shorter prefills, and would keep a replica from longer ones.
        rate = max((load.prefill_rate for load in loads), default=0.0)
        for replica, load in zip(group.replicas.values(), loads, strict=True):
            candidate = _candidate(group.info, replica, load, rate)
            candidate.prompt_tokens = tokens
            candidate.prompt_blocks = len(keys)
            held = replica.matched(keys, depths.get(replica.feed.number, 0), now)
            # One id at least is always computed, or there would be nothing to draw from.
            candidate.matched_blocks = min(held, max(tokens - 1, 0) // group.info.block_tokens)
            candidate.reason = unfit(group.info, replica, ask, now)
            found.append(Site(group, replica, keys, candidate))
    return found


def _candidate(info: GroupInfo, replica: Replica, load: Report, rate: float) -> Candidate:
    """Return what does not depend on the prompt."""
    return Candidate(
        group_id=replica.group_id,
        dp_rank=replica.dp_rank,
        view=replica.feed.view,
        block_tokens=info.block_tokens,
        running=load.running,
        waiting=load.waiting,
        uncached_tokens=load.uncached_tokens,
        free_blocks=load.free_blocks,
        cached_blocks=replica.feed.block_count,
        kv_blocks=info.kv_blocks,
        max_running=info.max_running,
        prefill_rate=rate,
        decode_step_s=load.decode_step_s,
    )


def unfit(info: GroupInfo, replica: Replica, ask: Ask, now: float) -> str:
    """Return why a replica can't take the ask now; empty when it can."""
    if ask.fingerprint and info.fingerprint != ask.fingerprint:
        return "another tokenizer"
    phase = replica.phase(now)
    if phase is not Phase.READY:
        return phase.name.lower()
    if ask.resume and not takes_resume(replica):
        return f"{RESUMES_UNSTARTED_LIMIT} interrupted streams wait there"
    return ""


def charge(candidate: Candidate, ask: Ask) -> Charge:
    """Return what the ask puts on the replica that it goes to."""
    tokens = candidate.prompt_tokens - candidate.matched_blocks * candidate.block_tokens
    blocks = math.ceil(tokens / candidate.block_tokens)
    return Charge(tokens=tokens, blocks=blocks, resume=ask.resume)


def takes_resume(replica: Replica) -> bool:
    """Whether one more interrupted stream may wait there."""
    return replica.workload.unstarted_resumes < RESUMES_UNSTARTED_LIMIT


def refusal(found: Iterable[Site], ask: Ask) -> NoReplicaReady | TokenizerMismatch:
    """Return why none of the sites is fit for the ask."""
    infos = [site.group.info for site in found if site.group.info]
    if infos and ask.fingerprint and all(ask.fingerprint != i.fingerprint for i in infos):
        return TokenizerMismatch(f"no worker group of {ask.model!r} has this tokenizer")
    return NoReplicaReady(f"no replica of {ask.model!r} can take requests now")


def preferred(fit: Sequence[Site], ask: Ask) -> list[Site]:
    """Narrow fit sites by what is to be avoided and what is hinted, as far as something is left."""
    kept = [
        site for site in fit if (*site.name, site.replica.incarnation) not in ask.avoid
    ] or list(fit)
    if not ask.hint_group:
        return kept
    hinted = [
        site
        for site in kept
        if site.name[0] == ask.hint_group and ask.hint_dp_rank in (None, site.name[1])
    ]
    return hinted or kept
