"""The core of the front: requests in, shares of steps out, replicas and routers kept in step.

Everything runs on the event loop and nothing here waits, but for `described`, `idle` and
what replicas must answer. Knows replicas, jobs and feeds; knows no wire, no sockets and
no processes.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Protocol

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import (
    BY_REASON,
    Draining,
    GroupLost,
    GroupNotFound,
    InternalError,
    InvalidRequest,
    MeshError,
    NoReplicaReady,
)
from worker.front.ask import Ask, GroupInfo, to_add
from worker.front.controls import Controls, Make
from worker.front.dispatch import Dispatcher
from worker.front.feed_out import Event
from worker.front.jobs import Job, Owner, split
from worker.front.meters import Meters
from worker.front.news import News
from worker.front.operation import Operation, Outcomes
from worker.front.plan import GroupPlan
from worker.front.probes import Probes
from worker.front.replica import Hold, LoadedWeights, Replica, ReplicaState
from worker.request import GOES_ON, Add, Flush, Pause, Ready, StepOutput, Weights

logger = logging.getLogger(__name__)

MAX_REPLICAS: Final = 1024


class Subscriber(Protocol):
    """A router that follows the replicas. Its methods are quick and never raise."""

    def on_info(self) -> None:
        """The group's description changed: its weights, or how many replicas it has."""
        ...

    def on_status(self, replica: Replica) -> None:
        """A replica changed state or incarnation; `replica.mirror` may be a new one."""
        ...

    def on_events(self, replica: Replica, events: Sequence[Event]) -> None:
        """A replica's cache changed."""
        ...

    def on_load(self, replica: Replica) -> None:
        """A replica has a new load report. Comes after `on_share` of the same step."""
        ...

    def on_tick(self) -> None:
        """A second went by."""
        ...


class Group:
    """A worker group. `clock` gives seconds that never go back.

    Attributes:
        replicas: By dp_rank; those that start or retire are there too.
        changed: Told when readiness, a replica's state or the number of replicas changed.
        idled: Told when a replica has no more requests.
    """

    def __init__(self, plan: GroupPlan, meters: Meters, clock: Callable[[], float]) -> None:
        self.plan = plan
        self.meters = meters
        self.replicas: list[Replica] = []
        self.subscribers: set[Subscriber] = set()
        self.changed = News()
        # Called with `changed`; set by the owner, if by anyone.
        self.on_change: Callable[[], None] = lambda: None
        self.idled = News()
        self._info: GroupInfo | None = None
        self._described = asyncio.Event()
        self._weights = LoadedWeights("", plan.weight_version)
        self._holds: set[Hold] = set()
        self._most_replicas = 0
        self._clock = clock
        self._dispatcher = Dispatcher(plan.dispatch)
        self._request_ids = itertools.count(1)
        self._controls = Controls()
        self._probes = Probes(
            self._controls,
            plan.probes,
            on_silent=partial(self._hold, hold=Hold.SILENT),
            on_heard=self._on_heard,
            clock=clock,
        )
        self._operation = Operation(self)
        meters.watch_links(lambda: len(self.subscribers))
        self._grow(plan.dp)

    @property
    def ready(self) -> bool:
        """Whether some replica takes requests."""
        return any(replica.state is ReplicaState.UP for replica in self.replicas)

    @property
    def job_count(self) -> int:
        """Requests under way."""
        return sum(len(replica.jobs) for replica in self.replicas)

    @property
    def has_been_ready(self) -> bool:
        """Whether a rank of the group has ever been ready."""
        return self._info is not None

    async def described(self) -> GroupInfo:
        """Wait until a rank has been ready once; return what the group is."""
        await self._described.wait()
        return self.info

    @property
    def info(self) -> GroupInfo:
        """What the group is. Raises NoReplicaReady while no rank has ever been ready."""
        if self._info is None:
            raise NoReplicaReady("the group is starting")
        return self._info

    # Requests.

    def submit(self, owner: Owner, entry_id: int, ask: Ask) -> Job:
        """Check a request and send it to a replica.

        Raises:
            Draining: The group or the named replica takes no new work now.
            GroupNotFound: There is no such replica.
            GroupLost: The named replica is down.
            NoReplicaReady: No replica was named and none takes work.
            QueueFull: The replica does not read its mailbox.
            InvalidRequest, TokenizerMismatch: See `ask.to_add`.
        """
        for hold in Hold:
            if hold in self._holds:
                raise Draining(f"the group {hold.value}")
        add = to_add(ask, self.info, request_id=next(self._request_ids))
        return self._dispatch(owner, entry_id, add, self._choose(ask))

    def submit_test(self, owner: Owner, ask: Ask, replica: Replica) -> Job:
        """Send a request to a replica that does not take any yet; it is not counted.

        Raises:
            MeshError: As `submit`.
        """
        add = to_add(ask, self.info, request_id=next(self._request_ids))
        return self._dispatch(owner, 0, add, replica, counted=False)

    def _dispatch(
        self, owner: Owner, entry_id: int, add: Add, replica: Replica, *, counted: bool = True
    ) -> Job:
        job = Job(
            request_id=add.request_id,
            entry_id=entry_id,
            owner=owner,
            dp_rank=replica.dp_rank,
            prompt_tokens=len(add.prompt) // ID_BYTES,
            uncached_tokens=(len(add.prompt) + len(add.output)) // ID_BYTES,
            dispatched_at=self._clock(),
            counted=counted,
        )
        replica.dispatch(job, add)
        return job

    def cancel(self, jobs: Iterable[Job], outcome: str = "cancelled") -> None:
        """Forget jobs and have their blocks freed. Jobs that are over are ignored."""
        by_replica: dict[Replica, list[Job]] = {}
        for job in jobs:
            replica = self._find(job.dp_rank)
            if replica is not None and job.request_id in replica.jobs:
                by_replica.setdefault(replica, []).append(job)
        for replica, held in by_replica.items():
            replica.withdraw(held)
            for job in held:
                self._ended(replica, job, outcome)

    def _choose(self, ask: Ask) -> Replica:
        if ask.dp_rank is None:
            return self._choose_any()
        replica = self._named(ask.dp_rank)
        if replica.state is ReplicaState.DOWN:
            raise GroupLost("the replica is down", dp_rank=ask.dp_rank)
        if replica.held_by is not None:
            raise Draining(f"the replica {replica.held_by.value}", dp_rank=ask.dp_rank)
        return replica

    def _find(self, dp_rank: int) -> Replica | None:
        return self.replicas[dp_rank] if 0 <= dp_rank < len(self.replicas) else None

    def _named(self, dp_rank: int) -> Replica:
        replica = self._find(dp_rank)
        if replica is not None:
            return replica
        if 0 <= dp_rank < self._most_replicas:
            # Who named it may not have heard of its end yet, and can go elsewhere.
            raise GroupLost("the replica has retired", dp_rank=dp_rank)
        raise GroupNotFound(
            f"there is no replica {dp_rank}", field="dp_rank", dp=len(self.replicas)
        )

    def _choose_any(self) -> Replica:
        candidates = [each.candidate for each in self.replicas if each.state is ReplicaState.UP]
        if not candidates:
            raise NoReplicaReady("no replica takes requests")
        return self.replicas[self._dispatcher.choose(candidates)]

    def _ended(self, replica: Replica, job: Job, outcome: str) -> None:
        if job.counted:
            self.meters.ended(job.dp_rank, outcome)
        if not replica.jobs:
            self.idled.tell()

    # What replicas report.

    def on_ready(self, ready: Ready) -> None:
        """Take over what a rank can do.

        Raises:
            InternalError: It differs from what the group has announced.
        """
        info = self.plan.info(ready)
        if self._info is not None and info != self._info:
            raise InternalError("the rank's limits differ from those of the group")
        self._info = info
        self._described.set()

    def on_up(self, replica: Replica) -> None:
        """Take requests for a replica from now on."""
        if replica.weights is not self._weights:
            replica.give_up(GroupLost("the weights changed while the replica started"))
            return
        replica.set_up(free_blocks=self.info.kv_blocks)
        if Hold.PAUSED in self._holds:
            # Before any request, so nothing is computed first; its loss is told otherwise.
            told = self.control(replica, partial(Pause, paused=True))
            told.add_done_callback(lambda answer: answer.exception())
        logger.info(
            "replica up", extra={"dp_rank": replica.dp_rank, "incarnation": replica.incarnation}
        )
        self._changed(replica)

    def on_down(self, replica: Replica, error: MeshError) -> None:
        """End a replica's life: its jobs fail, and nobody else's."""
        was_up = replica.state is not ReplicaState.DOWN
        lost = replica.lose()
        # Status first: a router that resumes the jobs must know not to come back here.
        if was_up:
            self.meters.lost(replica.dp_rank)
            self._changed(replica)
        for job in lost:
            self._ended(replica, job, error.reason)
            job.owner.on_failed(job.entry_id, error)
        self._controls.fail(replica, error)

    def on_output(self, replica: Replica, output: StepOutput) -> None:
        """Pass a step on: shares to owners, changes and load to routers."""
        events = replica.absorb(output)
        if replica.state is not ReplicaState.DOWN:
            self.meters.step(replica.dp_rank, output)
        self._pass_shares(replica, output)
        for failed in output.failed:
            job = replica.jobs.pop(failed.request_id, None)
            if job is not None:
                self._ended(replica, job, failed.reason)
                error = BY_REASON.get(failed.reason, InternalError)(failed.message)
                job.owner.on_failed(job.entry_id, error)
        for subscriber in list(self.subscribers):
            if events:
                subscriber.on_events(replica, events)
            subscriber.on_load(replica)
        for answer in output.answers:
            self._controls.answer(answer)

    def _pass_shares(self, replica: Replica, output: StepOutput) -> None:
        shares = split(output, replica.jobs)
        for started in output.started:
            begun = replica.jobs.get(started.request_id)
            if begun is not None and begun.counted:
                self.meters.started(
                    replica.dp_rank,
                    prompt_tokens=begun.prompt_tokens,
                    cached_tokens=started.cached_tokens,
                    waited_s=started.waited_us / 1e6,
                )
        for request_id, finish in zip(output.request_ids, output.finishes, strict=True):
            job = replica.jobs.pop(request_id, None) if finish != GOES_ON else None
            if job is not None:
                self._ended(replica, job, "finished")
        for owner, share in shares.items():
            share.weight_version = replica.weight_version
            owner.on_share(replica.dp_rank, share)

    # Operation.

    def drain(self, dp_rank: int | None = None) -> int:
        """Take no new work on a replica, or on none. Returns how many requests still run.

        Raises:
            GroupNotFound: There is no such replica.
        """
        if dp_rank is None:
            self.hold(Hold.DRAINED)
            return self.job_count
        replica = self._named(dp_rank)
        self._hold(replica, Hold.DRAINED)
        return len(replica.jobs)

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self.idled.until(lambda: not self.job_count)

    async def flush(self, dp_rank: int | None = None) -> int:
        """Empty the cache of a replica, or of all that are up. Returns blocks removed.

        Raises:
            GroupNotFound: There is no such replica.
            GroupLost: It is down, or went down meanwhile.
        """
        named = [self._named(dp_rank)] if dp_rank is not None else self.replicas
        answers = [
            self.control(replica, Flush)
            for replica in named
            if replica.state is not ReplicaState.DOWN or dp_rank is not None
        ]
        return sum(await asyncio.gather(*answers))

    async def pause(self) -> Outcomes:
        """Have nothing computed until `resume`; see `Operation.pause`."""
        return await self._operation.pause()

    async def resume(self) -> Outcomes:
        """Go on after `pause`; see `Operation.resume`."""
        return await self._operation.resume()

    async def update_weights(self, folder: str, version: str) -> Outcomes:
        """Compute with the weights in a directory from now on; see `Operation.update_weights`.

        Raises:
            MeshError: Nothing has changed.
        """
        return await self._operation.update_weights(folder, version)

    def control(
        self, replica: Replica, make: Make, *, then: Callable[[], None] = lambda: None
    ) -> asyncio.Future[int]:
        """Tell a replica's ranks something; see `Controls.order`.

        Raises:
            GroupLost: The replica is down.
        """
        return self._controls.order(replica, make, then=then)

    def hold(self, hold: Hold) -> None:
        """Take no new work on any replica, also not on one to come."""
        self._holds.add(hold)
        for replica in self.replicas:
            self._hold(replica, hold)

    def release(self, hold: Hold) -> None:
        """Take back a `hold`."""
        self._holds.discard(hold)
        for replica in self.replicas:
            self._release(replica, hold)

    async def prepare(self, replica: Replica) -> None:
        """Have ranks that just started compute with what the group computes with now.

        Raises:
            MeshError: They can't.
        """
        weights = self._weights
        if weights.folder:
            make = partial(Weights, folder=weights.folder, version=weights.version)
            await self.control(replica, make)
        replica.weights = weights

    def adopt(self, weights: LoadedWeights) -> None:
        """Describe the group by these weights, and have replicas start with them."""
        self._weights = weights
        self._describe(weight_version=weights.version)

    # Replicas that come and go.

    def scale(self, dp: int) -> int:
        """Have `dp` replicas from now on. Returns how many there are as yet.

        New ones come at the end; the highest retire: they take nothing new, and their owner
        ends them. One that still runs when it is wanted again is taken back as it is.

        Raises:
            InvalidRequest: It is not from 1 to 1024.
            Draining: The group is about to end.
        """
        if not 1 <= dp <= MAX_REPLICAS:
            raise InvalidRequest(
                f"dp is {dp}, must be from 1 to {MAX_REPLICAS}", field="dp", limit=MAX_REPLICAS
            )
        if Hold.DRAINED in self._holds:
            raise Draining("the group is draining")
        for replica in self.replicas[:dp]:
            self._release(replica, Hold.RETIRING)
        for replica in self.replicas[dp:]:
            self._hold(replica, Hold.RETIRING)
        self._grow(dp)
        logger.info("scaled", extra={"dp": dp, "replicas": len(self.replicas)})
        return len(self.replicas)

    def remove(self, replica: Replica) -> None:
        """Forget the last replica, which is down."""
        assert replica is self.replicas[-1], "dp_ranks would have a hole"
        self.replicas.pop()
        self.meters.forget(replica.dp_rank)
        self._describe(dp=len(self.replicas))
        self._tell_change()

    def failing(self, limit: int) -> bool:
        """Whether every replica that is wanted has failed `limit` times in a row."""
        wanted = [each for each in self.replicas if Hold.RETIRING not in each.holds]
        return all(replica.failures >= limit for replica in wanted)

    def _grow(self, dp: int) -> None:
        added = [Replica(dp_rank, holds=self._holds) for dp_rank in range(len(self.replicas), dp)]
        if not added:
            return
        self.replicas += added
        self._most_replicas = max(self._most_replicas, dp)
        self._describe(dp=dp)
        for replica in added:
            self.meters.watch(replica, kv_blocks=self._kv_blocks)
            self._changed(replica)

    def _kv_blocks(self) -> int:
        return self._info.kv_blocks if self._info else 0

    def _describe(self, *, dp: int | None = None, weight_version: str | None = None) -> None:
        plan = self.plan
        self.plan = replace(
            plan,
            dp=plan.dp if dp is None else dp,
            weight_version=plan.weight_version if weight_version is None else weight_version,
        )
        if self._info is None:
            return
        self._info = replace(self._info, dp=self.plan.dp, weight_version=self.plan.weight_version)
        for subscriber in list(self.subscribers):
            subscriber.on_info()

    # Time.

    def tick(self) -> None:
        """Do what is done once a second: load reports, proofs."""
        for replica in self.replicas:
            up = replica.state is not ReplicaState.DOWN
            if up and replica.weights is not self._weights and Hold.RELOADING not in self._holds:
                replica.give_up(GroupLost("the replica missed a change of weights"))
        for subscriber in list(self.subscribers):
            subscriber.on_tick()

    def probe(self) -> None:
        """Ask the ranks whether they are there, and judge those that do not answer."""
        self._probes.tick(self.replicas)

    def _on_heard(self, replica: Replica, seconds: float) -> None:
        self.meters.answered(seconds)
        self._release(replica, Hold.SILENT)

    def _hold(self, replica: Replica, hold: Hold) -> None:
        before = replica.state
        replica.holds.add(hold)
        self._held_or_not(replica, before)

    def _release(self, replica: Replica, hold: Hold) -> None:
        before = replica.state
        replica.holds.discard(hold)
        self._held_or_not(replica, before)

    def _tell_change(self) -> None:
        self.changed.tell()
        self.on_change()

    def _held_or_not(self, replica: Replica, before: ReplicaState) -> None:
        if replica.state is before:
            self._tell_change()
        else:
            self._changed(replica)

    def _changed(self, replica: Replica) -> None:
        for subscriber in list(self.subscribers):
            subscriber.on_status(replica)
        self._tell_change()
