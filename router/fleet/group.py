"""One worker group: its link, what it is, its replicas.

Passes what the group says of a replica to that replica if it belongs to its
present incarnation; everything of an old one is gone. Knows no other group.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final, Protocol

from radixmesh.errors import Draining, GroupLost, InvalidRequest, MeshError
from router.fleet.ask import SubmitSpec, WorkerSink
from router.fleet.booking import Booking
from router.fleet.changes import Change, Chunk, Digest
from router.fleet.feed import Index
from router.fleet.fitness import Fitness, Judges
from router.fleet.replica import SNAPSHOT_GRACE_S, Replica, Reported
from router.fleet.wire import GroupInfo
from router.fleet.worker_link import Entry, GroupEvents, Ticket
from router.fleet.workload import Report

logger = logging.getLogger(__name__)

REPLICAS_LIMIT: Final = 4096  # of one group; each costs a bit of every mask of the index


class GroupLink(Protocol):
    """The link of a group, as a group uses it; `worker_link.WorkerLink`."""

    @property
    def connected(self) -> bool:
        """Whether it is up."""
        ...

    @property
    def entries(self) -> Mapping[int, Entry]:
        """The outputs on it, by number."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes."""
        ...

    async def run(self) -> None:
        """Keep the link up until cancelled."""

    def submit(self, booking: Booking, spec: SubmitSpec, sink: WorkerSink) -> Ticket:
        """Send one output."""
        ...

    def fail_replica(self, dp_rank: int, keep: int | None, error: MeshError) -> None:
        """Fail every output of a replica, but for those of incarnation `keep`."""

    def resnapshot(self, dp_rank: int) -> None:
        """Ask for a new snapshot."""


class Listing(Protocol):
    """Where replicas are listed by what they serve; `lineup.Lineup`."""

    def expect(self, group_id: str) -> None:
        """A group is in the fleet that has not said yet what it serves."""

    def serve(self, group: "Group", info: GroupInfo) -> None:
        """A group said what it is."""

    def retire(self, group_id: str) -> None:
        """A group has left the fleet."""

    def enter(self, group: "Group", replica: Replica) -> None:
        """A replica is there."""

    def leave(self, replica: Replica) -> None:
        """A replica is there no more."""

    def touch(self, replica: Replica) -> None:
        """A replica has changed."""

    def judge(self, group: "Group") -> Fitness:
        """A life of one of its replicas begins: return what will be held against it."""
        ...


class Unlisted:
    """Where replicas of a group are listed that has left the fleet: nowhere."""

    def expect(self, group_id: str) -> None:
        """Not here."""

    def serve(self, group: "Group", info: GroupInfo) -> None:
        """Not here."""

    def retire(self, group_id: str) -> None:
        """Not here."""

    def enter(self, group: "Group", replica: Replica) -> None:
        """Not here."""

    def leave(self, replica: Replica) -> None:
        """Not here."""

    def touch(self, replica: Replica) -> None:
        """Not here."""

    def judge(self, group: "Group") -> Fitness:  # noqa: ARG002
        """Nothing is held against who gets no requests."""
        return Judges().fitness("")


Connect = Callable[[str, GroupEvents], GroupLink]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group is and what this router calls it."""

    address: str
    group_id: str


class Group:
    """A worker group at one address."""

    def __init__(
        self,
        where: GroupAddress,
        *,
        connect: Connect,
        index: Index,
        listing: Listing,
        clock: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self.group_id = where.group_id
        self.address = where.address
        self.info: GroupInfo | None = None
        self.replicas: dict[int, Replica] = {}
        self.drained = False
        self.duplicate_of = ""
        # Told which process answers here; empty: none any more. Set by the roster.
        self.on_instance: Callable[[Group, str], None] = lambda group, instance_id: None  # noqa: ARG005
        self.prefill_rate = 0.0  # the median of what its replicas have learned
        self._index = index
        self._listing = listing
        self._clock = clock
        self._on_change = on_change
        self._added_at = clock()
        listing.expect(where.group_id)
        self.link = connect(where.address, self)

    def __repr__(self) -> str:
        return f"<Group {self.group_id} at {self.address}: {list(self.replicas.values())}>"

    @property
    def in_flight(self) -> int:
        """Requests of this router there."""
        return sum(replica.in_flight for replica in self.replicas.values())

    def settled(self, now: float) -> bool:
        """Whether all replicas have sent their snapshots, or the group had its time."""
        if now - self._added_at >= SNAPSHOT_GRACE_S:
            return True
        if self.info is None or len(self.replicas) < self.info.dp:
            return False
        return all(replica.admitted(now) for replica in self.replicas.values())

    @property
    def idle(self) -> bool:
        """Whether nothing of this router runs there."""
        return not self.link.entries and not self.in_flight

    @property
    def withheld(self) -> str:
        """Why it gets nothing new, for people; empty when it does as far as the group goes."""
        if self.duplicate_of:
            return f"the same process as group {self.duplicate_of}"
        return "draining" if self.drained else ""

    def drain(self) -> None:
        """Send nothing new there."""
        self.drained = True
        self._withhold()

    def undrain(self) -> None:
        """Send requests there again."""
        self.drained = False
        self._withhold()

    def stand_back(self, for_group: str) -> None:
        """Leave new work to another group, which is the same process; empty: take it again."""
        self.duplicate_of = for_group
        self._withhold()
        self._on_change()

    def _withhold(self) -> None:
        for replica in self.replicas.values():
            replica.withhold(self.withheld)

    def hand_over(self) -> None:
        """Take away what still runs there; it goes on elsewhere."""
        error = Draining(f"group {self.group_id} is drained")
        for dp_rank in list(self.replicas):
            self.link.fail_replica(dp_rank, None, error)

    def tick(self, now: float) -> None:
        """Notice what did not come."""
        for replica in self.replicas.values():
            replica.tick(now)

    def depart(self) -> None:
        """The group leaves the fleet, and is not looked at from now on; its link is to end."""
        for replica in self.replicas.values():
            self._listing.leave(replica)
        self._listing.retire(self.group_id)
        self._listing = Unlisted()

    def close(self) -> None:
        """The group has left the fleet; its link has ended."""
        for replica in self.replicas.values():
            self._close(replica)
        self.replicas.clear()

    def _close(self, replica: Replica) -> None:
        self._listing.leave(replica)
        replica.close()

    def on_up(self, instance_id: str = "", *, is_new: bool) -> None:
        """The link is up. Everything known went when it was lost."""
        logger.info("group up", extra={"group": self.group_id, "is_new": is_new})
        self.on_instance(self, instance_id)

    def on_info(self, info: GroupInfo) -> None:
        """The group described itself, at first or anew; replicas beyond `info.dp` are gone."""
        if self.info is not None and self.info != info:
            logger.info("group changed", extra={"group": self.group_id, "is": info.topology})
        self.info = info
        for dp_rank in [dp_rank for dp_rank in self.replicas if dp_rank >= info.dp]:
            self._close(self.replicas.pop(dp_rank))
        for replica in self.replicas.values():
            replica.workload.kv_blocks = info.kv_blocks
        self._listing.serve(self, info)

    def on_status(self, dp_rank: int, incarnation: int, reported: Reported) -> None:
        """A replica changed state, or is announced.

        Raises:
            InvalidRequest: No group has so many.
        """
        if dp_rank >= REPLICAS_LIMIT:
            raise InvalidRequest(f"a group has at most {REPLICAS_LIMIT} replicas")
        replica = self.replicas.get(dp_rank)
        if replica is None:
            replica = self._add_replica(dp_rank)
        if replica.on_status(incarnation, reported, self._clock()):
            error = GroupLost(f"replica {self.group_id}/{dp_rank} is gone")
            keep = None if reported is Reported.DOWN else incarnation
            self.link.fail_replica(dp_rank, keep, error)

    def _add_replica(self, dp_rank: int) -> Replica:
        replica = Replica(
            self.group_id,
            dp_rank,
            index=self._index,
            ask=lambda: self.link.resnapshot(dp_rank),
            touch=self._listing.touch,
            judge=lambda: self._listing.judge(self),
        )
        replica.withhold(self.withheld)
        replica.workload.kv_blocks = self.info.kv_blocks if self.info else 0
        self.replicas[dp_rank] = replica
        self._listing.enter(self, replica)
        return replica

    def _current(self, dp_rank: int, incarnation: int) -> Replica | None:
        replica = self.replicas.get(dp_rank)
        return replica if replica and replica.incarnation == incarnation else None

    def _of_feed(self, dp_rank: int, incarnation: int) -> Replica | None:
        """Only a replica that is up has a feed: what comes unannounced announces it."""
        replica = self.replicas.get(dp_rank)
        if replica is None and self.info is not None and dp_rank >= self.info.dp:
            return None  # it has retired; a feed may lag behind what is said of its replica
        if replica is None or not replica.announced(incarnation):
            self.on_status(dp_rank, incarnation, Reported.UP)
        return self._current(dp_rank, incarnation)

    def on_chunk(self, dp_rank: int, incarnation: int, chunk: Chunk) -> None:
        """A part of a snapshot."""
        replica = self._of_feed(dp_rank, incarnation)
        if replica:
            replica.feed.on_chunk(chunk, self._clock())
            replica.on_feed()

    def on_change(self, dp_rank: int, incarnation: int, sequence: int, change: Change) -> None:
        """A numbered change of a cache."""
        replica = self._of_feed(dp_rank, incarnation)
        if replica:
            replica.feed.on_change(sequence, change, self._clock())
            replica.on_feed()

    def on_digest(self, dp_rank: int, incarnation: int, digest: Digest) -> None:
        """A proof of a cache."""
        replica = self._of_feed(dp_rank, incarnation)
        if replica:
            replica.feed.on_digest(digest, self._clock())
            replica.on_feed()

    def on_report(self, dp_rank: int, incarnation: int, report: Report) -> None:
        """The load of a replica."""
        replica = self._current(dp_rank, incarnation)
        if replica is None:
            return
        replica.on_report(report, self._clock())
        rates = [each.workload.prefill_rate for each in self.replicas.values()]
        rate = median([rate for rate in rates if rate > 0] or [0.0])
        if rate != self.prefill_rate:
            self.prefill_rate = rate
            for sibling in self.replicas.values():
                self._listing.touch(sibling)

    def on_step(self, dp_rank: int, incarnation: int) -> None:
        """A replica has made a step."""
        replica = self._current(dp_rank, incarnation)
        if replica:
            replica.on_step(self._clock())

    def on_frame_end(self) -> None:
        """Everything of one frame was told."""
        self._on_change()

    def on_down(self, error: MeshError) -> None:
        """The link is lost; every output on it was told."""
        logger.warning("group down", extra={"group": self.group_id, "error": error.message})
        self._index.meters.link_lost()
        now = self._clock()
        for replica in self.replicas.values():
            replica.on_link_down(now)
        self.on_instance(self, "")
        self._on_change()
