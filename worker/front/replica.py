"""One replica as the front sees it: state, load, cache mirror, and the jobs it holds.

Outlives its ranks: each start of them is a new life with a new incarnation. Knows no
processes (`supervisor.py` does) and no routers (`group.py` does).
"""

import enum
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from radixmesh.errors import GroupLost, MeshError
from worker.front.dispatch import Candidate
from worker.front.feed_out import Event, FeedBroken, Mirror
from worker.front.jobs import Job
from worker.request import Add, Cancel, Control, Flush, Inbound, LoadReport, StepOutput

logger = logging.getLogger(__name__)

REPAIR_TOKEN = 0
NO_LOAD = LoadReport(0, 0, 0, 0, 0.0, 0.0, 0)


class ReplicaState(enum.IntEnum):
    """What a replica can do now; the values of radixmesh.worker.v1.ReplicaState."""

    UP = 1
    DRAINING = 2
    DOWN = 3


class Hold(enum.Enum):
    """Why a replica that is up takes no new work; the value says it to people."""

    DRAINED = "is draining"
    RETIRING = "is retiring"
    PAUSED = "is paused"
    RELOADING = "is changing its weights"
    LEAVING = "is losing a host"
    SILENT = "does not answer"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedWeights:
    """What a replica computes with: a directory (empty: the model's own), and its version."""

    folder: str
    version: str


class Channel(Protocol):
    """The way to a replica's ranks."""

    def send(self, message: Inbound) -> None:
        """Send; never blocks. Raises GroupLost or QueueFull."""
        ...


class Replica:
    """A replica. Its owner calls `begin`, `set_up` and `lose`, in that order, again and again.

    Attributes:
        jobs: What it works on, by request number.
        holds: Why it takes no new work, if it is up; each is somebody's to take back.
        weights: What its ranks compute with now; None until they begin to serve.
        failures: Lives in a row that ended before they were healthy; its supervisor's.
    """

    def __init__(self, dp_rank: int, *, holds: Iterable[Hold] = ()) -> None:
        self.dp_rank = dp_rank
        self.incarnation = 0
        self.mirror = Mirror(0)
        self.load = NO_LOAD
        self.jobs: dict[int, Job] = {}
        self.holds = set(holds)
        self.weights: LoadedWeights | None = None
        self.failures = 0
        self._up = False
        self._channel: Channel | None = None
        self._on_broken: Callable[[MeshError], None] = lambda _: None
        self._unseen: deque[Job] = deque()  # dispatched, not yet in a load report
        self._unseen_tokens = 0
        self._distrusted = False
        self._repaired = False

    def __repr__(self) -> str:
        return f"Replica({self.dp_rank}, {self.state.name}, {len(self.jobs)} jobs, {self.mirror})"

    @property
    def state(self) -> ReplicaState:
        """What it can do now."""
        if not self._up:
            return ReplicaState.DOWN
        return ReplicaState.DRAINING if self.holds else ReplicaState.UP

    @property
    def weight_version(self) -> str:
        """Of the weights with which it computed what it said last."""
        return self.weights.version if self.weights else ""

    @property
    def held_by(self) -> Hold | None:
        """The first reason for which it takes no new work, in the order of `Hold`."""
        return next((hold for hold in Hold if hold in self.holds), None)

    @property
    def candidate(self) -> Candidate:
        """Its load for the dispatcher, with what was dispatched since the last report."""
        requests = self.load.running + self.load.waiting + len(self._unseen)
        return Candidate(self.dp_rank, self.load.uncached_tokens + self._unseen_tokens, requests)

    def begin(
        self, incarnation: int, channel: Channel, on_broken: Callable[[MeshError], None]
    ) -> None:
        """Start a life. `on_broken` is told when the replica must be started anew."""
        self.incarnation = incarnation
        self.mirror = Mirror(incarnation)
        self.load = NO_LOAD
        self._channel, self._on_broken = channel, on_broken
        self._distrusted = self._repaired = False

    def set_up(self, *, free_blocks: int) -> None:
        """Take requests from now on."""
        self._up = True
        if self.load is NO_LOAD:
            self.load = LoadReport(0, 0, 0, free_blocks, 0.0, 0.0, 0)

    def lose(self) -> list[Job]:
        """End a life. Returns the jobs that it held; they are over."""
        lost = list(self.jobs.values())
        self.jobs.clear()
        self._unseen.clear()
        self._unseen_tokens = 0
        self._up = False
        self._channel = None
        self.load = NO_LOAD
        self.holds.discard(Hold.SILENT)
        return lost

    def give_up(self, error: MeshError) -> None:
        """Have the replica started anew."""
        self._on_broken(error)

    def dispatch(self, job: Job, add: Add) -> None:
        """Send a request to the ranks.

        Raises:
            GroupLost: They are gone.
            QueueFull: They do not read.
        """
        self._send(add)
        self.jobs[job.request_id] = job
        self._unseen.append(job)
        self._unseen_tokens += job.uncached_tokens

    def withdraw(self, jobs: Iterable[Job]) -> None:
        """Forget jobs and tell the ranks. Jobs that are over are ignored."""
        gone = [job.request_id for job in jobs if self.jobs.pop(job.request_id, None)]
        if gone and self._channel is not None:
            try:
                self._channel.send(Cancel(gone))
            except GroupLost:
                logger.debug("cancelled in a lost replica", extra={"dp_rank": self.dp_rank})

    def tell(self, control: Control) -> None:
        """Tell the ranks something; their answer comes in a step. Raises GroupLost."""
        self._send(control)

    def absorb(self, output: StepOutput) -> list[Event]:
        """Take over load and cache changes of a step; return the numbered changes."""
        self.load = output.load
        while self._unseen and self._unseen[0].request_id <= output.load.last_request_id:
            job = self._unseen.popleft()
            self._unseen_tokens -= job.uncached_tokens
            job.owner.on_seen(self.dp_rank, job.entry_id)
        events = self._mirrored(output)
        if self._distrusted and any(answer.token == REPAIR_TOKEN for answer in output.answers):
            self.give_up(GroupLost("the cache feed is broken and could not be repaired"))
        return events

    def _send(self, message: Inbound) -> None:
        if self._channel is None:
            raise GroupLost("the replica is down", dp_rank=self.dp_rank)
        self._channel.send(message)

    def _mirrored(self, output: StepOutput) -> list[Event]:
        events = []
        for change in output.changes:
            if change.cleared:
                self._distrusted = False
            if self._distrusted:
                continue
            try:
                events.append(self.mirror.apply(change))
            except FeedBroken as error:
                self._distrust(str(error))
        if not self._distrusted and not self.mirror.agrees(output.digest):
            self._distrust("the rank's digest differs from the mirror's")
        return events

    def _distrust(self, why: str) -> None:
        # Whatever routers believe of this cache is wrong in the same way, so empty the
        # cache: that makes all copies equal again. A second time, restart the ranks.
        logger.error(
            "cache feed broken",
            extra={"dp_rank": self.dp_rank, "incarnation": self.incarnation, "reason": why},
        )
        self._distrusted = True
        if self._repaired:
            self.give_up(GroupLost(f"the cache feed broke again: {why}"))
            return
        self._repaired = True
        try:
            self.tell(Flush(REPAIR_TOKEN))
        except MeshError as error:
            self.give_up(error)
