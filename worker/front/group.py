"""The core of the front: requests in, parts of steps out, replicas and routers kept in step.

Everything runs on the event loop and nothing here waits, but for `idle` and what replicas
must answer. Knows replicas, jobs and feeds; knows no wire, no sockets and no processes.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import (
    BY_REASON,
    Draining,
    GroupLost,
    InternalError,
    MeshError,
    NoReplicaReady,
)
from worker.front.ask import Ask, GroupInfo, to_add
from worker.front.controls import Controls
from worker.front.description import Description, GroupSpec
from worker.front.dispatch import Dispatcher
from worker.front.feed_out import Event
from worker.front.jobs import Job, Owner, split
from worker.front.meters import Meters
from worker.front.news import News
from worker.front.operation import Operation
from worker.front.probes import Probes
from worker.front.replica import Hold, Replica, ReplicaState
from worker.front.roster import Roster
from worker.request import GOES_ON, Add, Flush, StepOutput

logger = logging.getLogger(__name__)


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
        """A replica has a new load report. Comes after `on_step` of the same step."""
        ...

    def on_tick(self) -> None:
        """A second went by."""
        ...


class Group:
    """A worker group. `clock` gives seconds that never go back.

    Attributes:
        description: What it is.
        roster: Its replicas, and the number of them.
        operation: What all of them are told together.
        probes: Whether they are there.
        idled: Told when a replica has no more requests.
    """

    def __init__(self, spec: GroupSpec, meters: Meters, clock: Callable[[], float]) -> None:
        self.meters = meters
        self.subscribers: set[Subscriber] = set()
        self.idled = News()
        self.description = Description(spec, on_change=self._on_description)
        self._dispatcher = Dispatcher(spec.dispatch)
        self._request_ids = itertools.count(1)
        self._metered = 0
        self.roster = Roster(on_state=self._on_state, on_size=self._on_size)
        self._controls = Controls()
        self.operation = Operation(
            self.roster,
            self._controls,
            weight_version=spec.weight_version,
            describe=self.description.reload,
        )
        self.probes = Probes(
            self._controls,
            spec.probes,
            on_silent=partial(self.roster.hold, hold=Hold.SILENT),
            on_heard=self._on_heard,
            clock=clock,
        )
        meters.watch_links(lambda: len(self.subscribers))
        self.roster.grow(spec.dp)

    @property
    def replicas(self) -> list[Replica]:
        """All of them, by dp_rank; those that start or retire are there too."""
        return self.roster.replicas

    @property
    def changed(self) -> News:
        """Told when readiness, a replica's state or the number of replicas changed."""
        return self.roster.changed

    @property
    def ready(self) -> bool:
        """Whether some replica takes requests."""
        return self.roster.ready

    @property
    def job_count(self) -> int:
        """Requests under way."""
        return sum(len(replica.jobs) for replica in self.replicas)

    @property
    def info(self) -> GroupInfo:
        """What it is. Raises NoReplicaReady while no rank has ever been ready."""
        return self.description.info

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
        hold = self.roster.held_by
        if hold is not None:
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
        brought = (len(add.prompt) + len(add.output)) // ID_BYTES
        job = Job(
            request_id=add.request_id,
            entry_id=entry_id,
            owner=owner,
            dp_rank=replica.dp_rank,
            prompt_tokens=brought,
            uncached_tokens=brought,
            counted=counted,
        )
        replica.dispatch(job, add)
        return job

    def cancel(self, jobs: Iterable[Job], outcome: str = "cancelled") -> None:
        """Forget jobs and have their blocks freed. Jobs that are over are ignored."""
        by_replica: dict[Replica, list[Job]] = {}
        for job in jobs:
            replica = self.roster.find(job.dp_rank)
            if replica is not None and job.request_id in replica.jobs:
                by_replica.setdefault(replica, []).append(job)
        for replica, held in by_replica.items():
            replica.withdraw(held)
            for job in held:
                self._ended(replica, job, outcome)

    def _choose(self, ask: Ask) -> Replica:
        if ask.dp_rank is None:
            return self._choose_any()
        replica = self.roster.named(ask.dp_rank)
        if replica.state is ReplicaState.DOWN:
            raise GroupLost("the replica is down", dp_rank=ask.dp_rank)
        if replica.held_by is not None:
            raise Draining(f"the replica {replica.held_by.value}", dp_rank=ask.dp_rank)
        return replica

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

    def on_up(self, replica: Replica) -> None:
        """Take requests for a replica from now on."""
        if not self.operation.is_current(replica):
            replica.give_up(GroupLost("the weights changed while the replica started"))
            return
        replica.set_up(free_blocks=self.info.kv_blocks)
        self.operation.on_up(replica)
        logger.info(
            "replica up", extra={"dp_rank": replica.dp_rank, "incarnation": replica.incarnation}
        )
        self.roster.announce(replica)

    def on_down(self, replica: Replica, error: MeshError) -> None:
        """End a replica's life: its jobs fail, and nobody else's."""
        was_up = replica.state is not ReplicaState.DOWN
        lost = replica.lose()
        # Status first: a router that resumes the jobs must know not to come back here.
        if was_up:
            self.meters.lost(replica.dp_rank)
            self.roster.announce(replica)
        for job in lost:
            self._ended(replica, job, error.reason)
            job.owner.on_failed(job.entry_id, error)
        self._controls.fail(replica, error)

    def on_output(self, replica: Replica, output: StepOutput) -> None:
        """Pass a step on: parts to owners, changes and load to routers."""
        events = replica.absorb(output)
        if replica.state is not ReplicaState.DOWN:
            self.meters.step(replica.dp_rank, output)
        self._pass_parts(replica, output)
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

    def _pass_parts(self, replica: Replica, output: StepOutput) -> None:
        parts = split(output, replica.jobs)
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
        for owner, part in parts.items():
            part.weight_version = replica.weight_version
            owner.on_step(replica.dp_rank, part)

    # Operation.

    def drain(self, dp_rank: int | None = None) -> int:
        """Take no new work on a replica, or on none. Returns how many requests still run.

        Raises:
            GroupNotFound: There is no such replica.
        """
        if dp_rank is None:
            self.roster.hold_all(Hold.DRAINED)
            return self.job_count
        replica = self.roster.named(dp_rank)
        self.roster.hold(replica, Hold.DRAINED)
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
        named = [self.roster.named(dp_rank)] if dp_rank is not None else self.replicas
        answers = [
            self._controls.order(replica, Flush)
            for replica in named
            if replica.state is not ReplicaState.DOWN or dp_rank is not None
        ]
        return sum(await asyncio.gather(*answers))

    def _on_size(self) -> None:
        dp = len(self.replicas)
        for replica in self.replicas[self._metered :]:
            self.meters.watch(replica, kv_blocks=lambda: self.description.kv_blocks)
        for dp_rank in range(dp, self._metered):
            self.meters.forget(dp_rank)
        self._metered = dp
        self.description.scale(dp)

    def _on_state(self, replica: Replica) -> None:
        for subscriber in list(self.subscribers):
            subscriber.on_status(replica)

    def _on_description(self) -> None:
        for subscriber in list(self.subscribers):
            subscriber.on_info()

    # Time.

    def tick(self) -> None:
        """Do what is done once a second: load reports, proofs."""
        self.operation.tick()
        for subscriber in list(self.subscribers):
            subscriber.on_tick()

    def probe(self) -> None:
        """Ask the ranks whether they are there, and judge those that do not answer."""
        self.probes.tick(self.replicas)

    def _on_heard(self, replica: Replica, seconds: float) -> None:
        self.meters.answered(seconds)
        self.roster.release(replica, Hold.SILENT)
