"""What each replica of a model holds of a prompt, and which may take it. Chooses nothing."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from radixmesh.blocks import ID_BYTES, Namespace, block_keys
from radixmesh.errors import NoReplicaReady, TokenizerMismatch
from router.fleet.ask import Ask
from router.fleet.feed import Index
from router.fleet.group import Group
from router.fleet.lineup import Kind, Model, Site
from router.fleet.replica import Replica
from router.fleet.views import CandidatePrice
from router.fleet.workload import Charge
from router.policy.choice import Ints, Name, Prices, Standing, Wish


@dataclass(slots=True)
class Holdings:
    """What of a prompt each replica holds.

    Attributes:
        keys: Of the prompt, for each kind of replica.
        held: Leading blocks in its cache, by row of the board, as far as the router knows.
        matched: The same with those that are about to be there.
    """

    keys: dict[Kind, Sequence[int]] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)
    matched: list[int] = field(default_factory=list)


def wish(ask: Ask) -> Wish:
    """Return what a policy may know of an ask."""
    return Wish(
        prompt_tokens=len(ask.ids) // ID_BYTES, max_tokens=ask.max_tokens, session=ask.session
    )


def look_up(model: Model, ask: Ask, index: Index, now: float) -> Holdings:
    """Hash the prompt for each kind of replica, and look who holds how much of it."""
    count = len(model.board)
    found = Holdings(held=[0] * count, matched=[0] * count)
    tokens = len(ask.ids) // ID_BYTES
    for kind in model.kinds:
        namespace = Namespace(
            model=model.name,
            weight_version=kind.weight_version,
            fingerprint=kind.fingerprint,
            adapter=ask.adapter,
            cache_salt=ask.cache_salt,
        )
        keys = block_keys(ask.ids, block_tokens=kind.block_tokens, seed=namespace.seed())
        found.keys[kind] = keys
        # One id at least is always computed, or there would be nothing to draw from.
        reusable = keys[: max(tokens - 1, 0) // kind.block_tokens]
        held, soon = index.tree.reach(reusable)
        _note(model, held, found.held)
        _note(model, held, found.matched)
        _note(model, soon, found.matched)
        for site in model.guessed:
            if site.kind == kind:
                row = site.row.index
                found.matched[row] = max(found.matched[row], site.replica.guess(reusable, now))
    return found


def _note(model: Model, depths: dict[int, int], rows: list[int]) -> None:
    numbers = model.numbers
    for number, depth in depths.items():
        row = numbers.get(number)
        if row is not None:
            rows[row.index] = depth


def standing(group: Group, replica: Replica, now: float) -> Standing:
    """Return how a replica stands, whatever is asked of it. Its group has said what it is."""
    load, info = replica.workload.at(now), group.info
    if info is None:
        return Standing(reason="not known yet")
    return Standing(
        reason=replica.stand(now),
        view=replica.feed.view,
        block_tokens=info.block_tokens,
        running=load.running,
        waiting=load.waiting,
        uncached_tokens=load.uncached_tokens,
        free_blocks=load.free_blocks,
        cached_blocks=replica.feed.block_count,
        kv_blocks=info.kv_blocks,
        max_running=info.max_running,
        step_tokens=info.step_tokens,
        # Replicas of a group are equal machines: what they have learned holds for all of them.
        prefill_rate=group.prefill_rate,
        decode_step_s=load.decode_step_s,
    )


def fit_rows(model: Model, prices: Prices, ask: Ask, now: float) -> Ints:
    """Return the rows that may be chosen.

    Raises:
        NoReplicaReady: None of them can take it now.
        TokenizerMismatch: The ids are of another tokenizer than all of theirs.
    """
    rows = np.flatnonzero(prices.eligible)
    mixed = _mixed(model, ask)
    if mixed:
        rows = _of_tokenizer(model, rows.tolist(), ask)
    if not len(rows):
        every = range(len(model.board))
        rows = last_resort(model, _of_tokenizer(model, every, ask) if mixed else every, now)
    if ask.resume:
        rows = np.array([row for row in rows.tolist() if not unfit(model.site_at(row), ask)], int)
    if not len(rows):
        raise _refusal(model, ask)
    return _preferred(model, rows, ask) if ask.avoid or ask.hint_group else rows


def last_resort(model: Model, rows: Iterable[int], now: float) -> Ints:
    """Return, where nobody is fit, the row of who is ready and failed least recently, if any.

    A breaker spares the others a replica that fails; where there is no other it would only
    add an outage of its own.
    """
    spared = [(model.site_at(row).replica.suffered_at(now), row) for row in rows]
    known = [(suffered_at, row) for suffered_at, row in spared if suffered_at is not None]
    return np.array([min(known)[1]] if known else [], int)


def unfit(site: Site, ask: Ask) -> str:
    """Return why a replica that takes work can't take this; empty when it can."""
    if ask.fingerprint and site.kind.fingerprint != ask.fingerprint:
        return "another tokenizer"
    return site.replica.refuses_resume() if ask.resume else ""


def _mixed(model: Model, ask: Ask) -> bool:
    return bool(ask.fingerprint) and any(k.fingerprint != ask.fingerprint for k in model.kinds)


def _of_tokenizer(model: Model, rows: Iterable[int], ask: Ask) -> Ints:
    fitting = [row for row in rows if model.site_at(row).kind.fingerprint == ask.fingerprint]
    return np.array(fitting, int)


def _refusal(model: Model, ask: Ask) -> NoReplicaReady | TokenizerMismatch:
    infos = model.groups.values()
    if ask.fingerprint and all(info.fingerprint != ask.fingerprint for info in infos):
        return TokenizerMismatch(f"no worker group of {ask.model!r} has this tokenizer")
    return NoReplicaReady(f"no replica of {ask.model!r} can take requests now")


def _preferred(model: Model, rows: Ints, ask: Ask) -> Ints:
    """Narrow rows by what is to be avoided and what is hinted, as far as something is left."""
    sites = [model.site_at(row) for row in rows.tolist()]
    kept = [site for site in sites if (*_name(site), site.replica.incarnation) not in ask.avoid]
    hinted = [
        site
        for site in kept or sites
        if ask.hint_group == site.replica.group_id
        and ask.hint_dp_rank in (None, site.replica.dp_rank)
    ]
    return np.array([site.row.index for site in hinted or kept or sites], int)


def _name(site: Site) -> Name:
    return site.replica.group_id, site.replica.dp_rank


def charge(price: CandidatePrice, prompt_tokens: int, *, resume: bool) -> Charge:
    """Return what a request puts on the replica that it goes to."""
    tokens = prompt_tokens - price.matched_blocks * price.block_tokens
    return Charge(tokens=tokens, blocks=math.ceil(tokens / price.block_tokens), resume=resume)


def quote(
    model: Model, row: int, prices: Prices, found: Holdings, now: float, *, reason: str = ""
) -> CandidatePrice:
    """Return the price at one replica with all that it is made of."""
    site, stands = model.site_at(row), prices.standings[row]
    reason = stands.reason or reason
    return CandidatePrice(
        group_id=site.replica.group_id,
        dp_rank=site.replica.dp_rank,
        eligible=not reason,
        reason=reason,
        phase=site.replica.phase(now),
        view=stands.view,
        block_tokens=stands.block_tokens,
        prompt_blocks=len(found.keys[site.kind]),
        held_blocks=found.held[row],
        matched_blocks=found.matched[row],
        running=stands.running,
        waiting=stands.waiting,
        wait_s=float(prices.wait_s[row]),
        prefill_s=float(prices.prefill_s[row]),
        alpha=float(prices.alpha[row]),
        crowding_s=float(prices.crowding_s[row]),
        eviction_s=float(prices.eviction_s[row]),
        total_s=float(prices.total_s[row]),
    )
