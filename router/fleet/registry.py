"""The fleet: all groups, and where the next request goes.

Owns the meta-tree, the marks, the groups and their links. Chooses by the policy
that it is given; knows no wire format, no text and nothing of what becomes of an
output. Clock and chance come from outside.
"""

import asyncio
import math
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from random import Random

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import GroupLost, ModelNotServed, NoReplicaReady, TokenizerMismatch
from router.fleet.ask import Ask, ModelInfo, SubmitSpec, WorkerSink
from router.fleet.booking import Booking
from router.fleet.breaker import Outcome
from router.fleet.catalog import count, explained, replica_view
from router.fleet.feed import Index
from router.fleet.fitness import Judges, Stance
from router.fleet.group import Connect, Group, GroupAddress
from router.fleet.lineup import Lineup, Model, Site
from router.fleet.placing import (
    Holdings,
    charge,
    fit_rows,
    last_resort,
    look_up,
    quote,
    standing,
    unfit,
    wish,
)
from router.fleet.roster import Leave, Roster
from router.fleet.views import CandidatePrice, Phase, ReplicaView
from router.fleet.waiting import Waiters
from router.fleet.worker_link import Ticket
from router.policy.choice import Policy, View

TICK_S = 0.5
_SWEEP_PER_TICK = 20_000


class Fleet:
    """All worker groups of a router: none at first, `add_group` attaches them.

    Args:
        policy: Chooses among replicas that are fit.
        connect: Makes the link of a group; `WorkerLink` with this router's identity.
        index: The meta-tree with its budget, the marks, the meters.
        judges: Say which replicas get no new work for what became of their requests.
        clock: Monotonic seconds.
        rng: Chance of ties.
    """

    def __init__(
        self,
        *,
        policy: Policy,
        connect: Connect,
        index: Index | None = None,
        judges: Judges | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: Random | None = None,
    ) -> None:
        self._index = index or Index()
        self.tree = self._index.tree
        self.policy = policy
        self._clock = clock
        self._rng = rng or Random()
        self._lineup = Lineup(standing, judges)
        self._waiters = Waiters(self._room)
        self._watchers: set[asyncio.Future[None]] = set()
        self.groups = Roster(
            lambda where: Group(
                where,
                connect=connect,
                index=self._index,
                listing=self._lineup,
                clock=clock,
                on_change=self._on_change,
            )
        )

    def __repr__(self) -> str:
        return f"<Fleet {list(self.groups)}>"

    async def run(self) -> None:
        """Keep all links up and notice what does not come, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self.groups.start(tasks)
                while True:
                    await asyncio.sleep(TICK_S)
                    self.tick()
        finally:
            self.groups.stop()

    def tick(self) -> None:
        """Notice what did not come. `run` calls it twice a second."""
        now = self._clock()
        for group in self.groups:
            group.tick(now)
        self.groups.tick(now)
        self.tree.sweep(_SWEEP_PER_TICK)
        self._on_change()

    def models(self) -> list[ModelInfo]:
        """Return what is served, by name. A group that is away still counts as serving it."""
        return [self.limits(name) for name in sorted(model.name for model in self._lineup)]

    def limits(self, model: str) -> ModelInfo:
        """Return what a model takes.

        Raises:
            ModelNotServed: No group serves it.
            NoReplicaReady: Some group has not said yet what it serves.
        """
        served = self._model(model)
        return replace(served.info(), ready_replicas=len(served.board.eligible_rows()))

    def place(self, ask: Ask) -> Booking:
        """Choose a replica and book it at once.

        Raises:
            ModelNotServed: No group serves the model.
            NoReplicaReady: None can take it now.
            TokenizerMismatch: The ids are of another tokenizer than every group's.
        """
        began = self._clock()
        model = self._model(ask.model)
        wanted = wish(ask)
        found = look_up(model, ask, self._index, began)
        prices = model.board.price(found.matched, wanted)
        rows = fit_rows(model, prices, ask, began)
        row = self.policy.choose(prices, rows, wanted, self._rng)
        price = quote(model, row, prices, found, began)
        self._index.meters.chosen(self.policy.name, self._clock() - began)
        return self._book(model.site_at(row), ask, price, found)

    async def wait_ready(self, model: str, *, resume: bool = False) -> None:
        """Return when a replica of the model can take work.

        Args:
            model: Served name; empty means the only one.
            resume: Whether an interrupted stream waits; these are woken first, as many
                as may wait for their prefill at once.
        """
        await self._waiters.wait(model, resume=resume)

    def submit(self, booking: Booking, spec: SubmitSpec, sink: WorkerSink) -> Ticket:
        """Send an output to its booked replica; a booking of n outputs is sent n times.

        The booking is released with its last output.

        Raises:
            GroupLost: The replica has gone since it was booked.
            LinkLost, LinkOverloaded: It can't be sent.
        """
        group = self.groups.find(booking.group_id)
        replica = group.replicas.get(booking.dp_rank) if group else None
        if group is None or replica is None or replica.incarnation != booking.incarnation:
            raise GroupLost(f"replica {booking.group_id}/{booking.dp_rank} is gone")
        ticket = group.link.submit(booking, spec, sink)
        replica.counters.routed += 1
        # All that the cache is asked for: of a resumed output also what was generated before.
        looked_up = len(spec.prompt_ids) + len(spec.output_ids)
        replica.counters.prompt_tokens += looked_up // ID_BYTES
        return ticket

    def explain(self, ask: Ask) -> list[CandidatePrice]:
        """Price the ask at every replica: the chosen one first, those that can't take it last.

        Raises:
            ModelNotServed: No group serves the model.
            NoReplicaReady: Some group has not said yet what it serves.
        """
        now = self._clock()
        model = self._model(ask.model)
        wanted = wish(ask)
        found = look_up(model, ask, self._index, now)
        prices = model.board.price(found.matched, wanted)
        try:
            rows = fit_rows(model, prices, ask, now)
        except (NoReplicaReady, TokenizerMismatch):
            chosen = None
        else:
            # A copy, so that a policy that takes turns is not moved on.
            chosen = copy(self.policy).choose(prices, rows, wanted, self._rng)
        quotes = [
            quote(model, row, prices, found, now, reason=unfit(model.site_at(row), ask))
            for row in range(len(model.board))
        ]
        return explained(quotes, chosen, self.policy.name)

    def count(self, phase: Phase, view: View) -> int:
        """Return how many replicas are in a phase and have a view of this kind."""
        return count(self.groups, phase, view, self._clock())

    def count_stances(self, stance: Stance) -> int:
        """Return how many replicas stand so by what became of their requests."""
        now = self._clock()
        replicas = (each for group in self.groups for each in list(group.replicas.values()))
        return sum(replica.stance(now) is stance for replica in replicas)

    def replicas(self) -> list[ReplicaView]:
        """Return all replicas, by group, then rank."""
        now = self._clock()
        return [
            replica_view(group, dp_rank, now)
            for group in sorted(self.groups, key=lambda group: group.group_id)
            for dp_rank in sorted(group.replicas)
        ]

    def add_group(self, address: str, group_id: str = "") -> str:
        """Attach a group, or undrain it; return its name. Its replicas appear when it answers.

        Raises:
            GroupExists: The name or the address is in the fleet already.
        """
        group = self.groups.add(GroupAddress(address, group_id or address))
        self._on_change()
        return group.group_id

    def remove_group(self, group_id: str) -> None:
        """Detach a group; its outputs fail with LINK_LOST and are resumed elsewhere.

        Raises:
            GroupNotFound: There is none of that name.
        """
        self.groups.remove(group_id)
        self._on_change()

    def drain_group(
        self, group_id: str, *, remove: bool = False, within_s: float | None = None
    ) -> int:
        """Send nothing new to a group; return how many requests of this router run there.

        Args:
            group_id: Its name.
            remove: Detach it when nothing runs there any more.
            within_s: Hand over to other groups what still runs there after so long.

        Raises:
            GroupNotFound: There is none of that name.
        """
        deadline = math.inf if within_s is None else self._clock() + within_s
        running = self.groups.drain(group_id, Leave(remove, deadline))
        self._on_change()
        return running

    async def changed(self) -> None:
        """Return after the next change of any replica, its load included."""
        watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watchers.add(watcher)
        try:
            await watcher
        finally:
            self._watchers.discard(watcher)

    def _model(self, name: str) -> Model:
        self._lineup.refresh(self._clock())
        return self._lineup.find(name)

    def _book(self, site: Site, ask: Ask, price: CandidatePrice, found: Holdings) -> Booking:
        replica, keys, now = site.replica, found.keys[site.kind], self._clock()
        counters = replica.counters

        stay = replica.sent(price.wait_s + price.prefill_s, now)
        charged = charge(price, len(ask.ids) // ID_BYTES, resume=ask.resume)

        def count_cached(tokens: int) -> None:
            counters.cached_tokens += tokens
            if not booking.released:  # else its replica has gone
                replica.on_reused(keys[: tokens // price.block_tokens])
            # Ids that were not found after all are no fault of the replica's.
            missed = price.matched_blocks * price.block_tokens - tokens
            stay.predicted_s += missed * price.prefill_s / max(1, charged.tokens)

        def on_outcome(outcome: Outcome) -> None:
            replica.on_outcome(stay, outcome, self._clock())

        def unbook(booking: Booking) -> None:
            replica.unbook(booking)
            self._on_change()

        booking = Booking(
            group_id=price.group_id,
            dp_rank=price.dp_rank,
            incarnation=replica.incarnation,
            price=price,
            possible_blocks=max(found.matched),
            policy=self.policy.name,
            booked_at=now,
            charge=charged,
            marks=self.tree.mark(replica.feed.number, keys),
            on_release=unbook,
            on_cached=count_cached,
            on_outcome=on_outcome,
            silent_s=lambda: replica.pulse.silent_s(now, self._clock()),
        )
        replica.book(booking, keys, now)
        return booking

    def _room(self, model: str) -> tuple[int, bool]:
        """How many interrupted streams the model could take, and whether it takes new work."""
        try:
            served = self._model(model)
        except (ModelNotServed, NoReplicaReady):
            return 0, False
        ready = [site.replica for site in served.eligible()]
        if not ready:
            spare = last_resort(served, range(len(served.board)), self._clock())
            ready = [served.site_at(row).replica for row in spare]
        room = sum(replica.resume_room for replica in ready)
        return room, bool(ready)

    def _on_change(self) -> None:
        self._waiters.wake()
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)
