"""The core of the front: requests in, shares of steps out, replicas and routers kept in step.

Everything runs on the event loop and nothing here waits, but for `flush`, `described`
and `idle`. Knows replicas, jobs and feeds; knows no wire, no sockets and no processes.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import (
    BY_REASON,
    Draining,
    GroupLost,
    GroupNotFound,
    InternalError,
    MeshError,
    NoReplicaReady,
)
from worker.front.ask import Ask, GroupInfo, to_add
from worker.front.dispatch import Dispatcher
from worker.front.feed_out import Event
from worker.front.flushes import Flushes
from worker.front.jobs import Job, Owner, split
from worker.front.meters import Meters
from worker.front.plan import GroupPlan
from worker.front.replica import Replica, ReplicaState
from worker.request import GOES_ON, Add, Ready, StepOutput

logger = logging.getLogger(__name__)


class Subscriber(Protocol):
    """A router that follows the replicas. Its methods are quick and never raise."""

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
    """A worker group. `clock` gives seconds that never go back."""

    def __init__(self, plan: GroupPlan, meters: Meters, clock: Callable[[], float]) -> None:
        self.plan = plan
        self.meters = meters
        self.replicas = [Replica(dp_rank) for dp_rank in range(plan.dp)]
        self.subscribers: set[Subscriber] = set()
        # Called whenever readiness may have changed; set by the owner.
        self.on_change: Callable[[], None] = lambda: None
        self._info: GroupInfo | None = None
        self._described = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._clock = clock
        self._dispatcher = Dispatcher()
        self._request_ids = itertools.count(1)
        self._flushes = Flushes()
        meters.watch(
            self.replicas,
            kv_blocks=lambda: self._info.kv_blocks if self._info else 0,
            links=lambda: len(self.subscribers),
        )

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
            Draining: The group or the named replica takes no new work.
            GroupNotFound: There is no such replica.
            GroupLost: The named replica is down.
            NoReplicaReady: No replica was named and none takes work.
            QueueFull: The replica does not read.
            InvalidRequest, TokenizerMismatch: See `ask.to_add`.
        """
        if self._draining:
            raise Draining("the group is draining")
        add = to_add(ask, self.info, request_id=next(self._request_ids))
        return self._dispatch(owner, entry_id, add, self._choose(ask))

    def probe(self, owner: Owner, ask: Ask, replica: Replica) -> Job:
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
        self._idle.clear()
        return job

    def cancel(self, jobs: Iterable[Job], outcome: str = "cancelled") -> None:
        """Forget jobs and have their blocks freed. Jobs that are over are ignored."""
        by_replica: dict[int, list[Job]] = {}
        for job in jobs:
            if job.request_id in self.replicas[job.dp_rank].jobs:
                by_replica.setdefault(job.dp_rank, []).append(job)
        for dp_rank, held in by_replica.items():
            self.replicas[dp_rank].withdraw(held)
            for job in held:
                self._ended(job, outcome)

    def _choose(self, ask: Ask) -> Replica:
        if ask.dp_rank is None:
            return self._choose_any()
        if not 0 <= ask.dp_rank < len(self.replicas):
            raise GroupNotFound(
                f"there is no replica {ask.dp_rank}", field="dp_rank", dp=len(self.replicas)
            )
        replica = self.replicas[ask.dp_rank]
        if replica.state is ReplicaState.DOWN:
            raise GroupLost("the replica is down", dp_rank=ask.dp_rank)
        if replica.draining:
            raise Draining("the replica is draining", dp_rank=ask.dp_rank)
        return replica

    def _choose_any(self) -> Replica:
        candidates = [each.candidate for each in self.replicas if each.state is ReplicaState.UP]
        if not candidates:
            raise NoReplicaReady("no replica takes requests")
        return self.replicas[self._dispatcher.choose(candidates)]

    def _ended(self, job: Job, outcome: str) -> None:
        if job.counted:
            self.meters.ended(job.dp_rank, outcome)
        if not self.job_count:
            self._idle.set()

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
        replica.set_up(free_blocks=self.info.kv_blocks)
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
            self._ended(job, error.reason)
            job.owner.on_failed(job.entry_id, error)
        self._flushes.fail(replica, error)

    def on_output(self, replica: Replica, output: StepOutput) -> None:
        """Pass a step on: shares to owners, changes and load to routers."""
        events = replica.absorb(output, now=self._clock())
        if replica.state is not ReplicaState.DOWN:
            self.meters.step(replica.dp_rank, output)
        self._pass_shares(replica, output)
        for failed in output.failed:
            job = replica.jobs.pop(failed.request_id, None)
            if job is not None:
                self._ended(job, failed.reason)
                error = BY_REASON.get(failed.reason, InternalError)(failed.message)
                job.owner.on_failed(job.entry_id, error)
        for subscriber in list(self.subscribers):
            if events:
                subscriber.on_events(replica, events)
            subscriber.on_load(replica)
        for answer in output.answers:
            self._flushes.answer(answer.token, answer.number)

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
                self._ended(job, "finished")
        for owner, share in shares.items():
            owner.on_share(replica.dp_rank, share)

    # Operation.

    def drain(self, dp_rank: int | None = None) -> int:
        """Take no new work on a replica, or on none. Returns how many requests still run.

        Raises:
            GroupNotFound: There is no such replica.
        """
        replicas = self._named(dp_rank)
        if dp_rank is None:
            self._draining = True
        for replica in replicas:
            if not replica.draining:
                replica.draining = True
                self._changed(replica)
        return sum(len(replica.jobs) for replica in replicas)

    async def idle(self) -> None:
        """Wait until no request is under way."""
        await self._idle.wait()

    async def flush(self, dp_rank: int | None = None) -> int:
        """Empty the cache of a replica, or of all that are up. Returns blocks removed.

        Raises:
            GroupNotFound: There is no such replica.
            GroupLost: It is down, or went down meanwhile.
        """
        orders = [
            self._flushes.order(replica)
            for replica in self._named(dp_rank)
            if replica.state is not ReplicaState.DOWN or dp_rank is not None
        ]
        return sum(await asyncio.gather(*orders))

    def tick(self) -> None:
        """Do what is done once a second: load reports, proofs, the watchdog."""
        now = self._clock()
        for replica in self.replicas:
            silent_s = now - replica.last_output_at
            if replica.jobs and silent_s > self.plan.step_timeout_s:
                replica.give_up(GroupLost(f"the replica has been stuck for {silent_s:.0f} s"))
        for subscriber in list(self.subscribers):
            subscriber.on_tick()

    def _named(self, dp_rank: int | None) -> list[Replica]:
        if dp_rank is None:
            return self.replicas
        if dp_rank >= len(self.replicas):
            raise GroupNotFound(f"there is no replica {dp_rank}", field="dp_rank")
        return [self.replicas[dp_rank]]

    def _changed(self, replica: Replica) -> None:
        for subscriber in list(self.subscribers):
            subscriber.on_status(replica)
        self.on_change()
