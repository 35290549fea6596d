"""The replicas of a group: who is there, who is to go, and why some take no new work.

Knows states and numbers; knows neither requests nor routers nor processes.
"""

import logging
from collections.abc import Callable
from typing import Final

from radixmesh.errors import Draining, GroupLost, GroupNotFound, InvalidRequest
from worker.front.news import News
from worker.front.replica import Hold, Replica, ReplicaState

logger = logging.getLogger(__name__)

MAX_REPLICAS: Final = 1024


class Roster:
    """Replicas by dp_rank, without a hole; those that start or retire are there too.

    `on_state` is told of a replica whose state changed, `on_size` when there are more or
    fewer, before any state of those that are new.

    Attributes:
        changed: Told after either, and when a replica is to retire or is wanted again.
    """

    def __init__(self, *, on_state: Callable[[Replica], None], on_size: Callable[[], None]) -> None:
        self.replicas: list[Replica] = []
        self.changed = News()
        self._holds: set[Hold] = set()
        self._most = 0
        self._on_state = on_state
        self._on_size = on_size

    def __repr__(self) -> str:
        return f"Roster({self.replicas})"

    @property
    def ready(self) -> bool:
        """Whether some replica takes requests."""
        return any(replica.state is ReplicaState.UP for replica in self.replicas)

    @property
    def up(self) -> list[Replica]:
        """Those with ranks that serve, whether they take new work or not."""
        return [each for each in self.replicas if each.state is not ReplicaState.DOWN]

    @property
    def held_by(self) -> Hold | None:
        """The first reason for which all take no new work."""
        return next((hold for hold in Hold if hold in self._holds), None)

    def held(self, hold: Hold) -> bool:
        """Whether all take no new work for this reason."""
        return hold in self._holds

    def find(self, dp_rank: int) -> Replica | None:
        """Return a replica, or None where there is none now."""
        return self.replicas[dp_rank] if 0 <= dp_rank < len(self.replicas) else None

    def named(self, dp_rank: int) -> Replica:
        """Return a replica.

        Raises:
            GroupLost: It has retired.
            GroupNotFound: There never was one.
        """
        replica = self.find(dp_rank)
        if replica is not None:
            return replica
        if 0 <= dp_rank < self._most:
            # Who named it may not have heard of its end yet, and can go elsewhere.
            raise GroupLost("the replica has retired", dp_rank=dp_rank)
        raise GroupNotFound(
            f"there is no replica {dp_rank}", field="dp_rank", dp=len(self.replicas)
        )

    def hold_all(self, hold: Hold) -> None:
        """Have none take new work, also none to come."""
        self._holds.add(hold)
        for replica in self.replicas:
            self.hold(replica, hold)

    def release_all(self, hold: Hold) -> None:
        """Take back a `hold_all`."""
        self._holds.discard(hold)
        for replica in self.replicas:
            self.release(replica, hold)

    def hold(self, replica: Replica, hold: Hold) -> None:
        """Have a replica take no new work, for this reason too."""
        before = replica.state
        replica.holds.add(hold)
        self._judge(replica, before)

    def release(self, replica: Replica, hold: Hold) -> None:
        """Take back a `hold`."""
        before = replica.state
        replica.holds.discard(hold)
        self._judge(replica, before)

    def announce(self, replica: Replica) -> None:
        """The state of a replica changed, or its incarnation."""
        self._on_state(replica)
        self.changed.tell()

    def scale(self, dp: int) -> int:
        """Have `dp` replicas from now on. Returns how many there are as yet.

        New ones come at the end; the highest retire: they take nothing new, and their
        owner ends them. One that still runs when it is wanted again is taken back as it is.

        Raises:
            InvalidRequest: It is not from 1 to 1024.
            Draining: The group is about to end.
        """
        if not 1 <= dp <= MAX_REPLICAS:
            raise InvalidRequest(
                f"dp is {dp}, must be from 1 to {MAX_REPLICAS}", field="dp", limit=MAX_REPLICAS
            )
        if self.held(Hold.DRAINED):
            raise Draining("the group is draining")
        for replica in self.replicas[:dp]:
            self.release(replica, Hold.RETIRING)
        for replica in self.replicas[dp:]:
            self.hold(replica, Hold.RETIRING)
        self.grow(dp)
        logger.info("scaled", extra={"dp": dp, "replicas": len(self.replicas)})
        return len(self.replicas)

    def grow(self, dp: int) -> None:
        """Add replicas until there are `dp`; they are down until somebody starts them."""
        numbers = range(len(self.replicas), dp)
        added = [Replica(dp_rank, holds=self._holds) for dp_rank in numbers]
        if not added:
            return
        self.replicas += added
        self._most = max(self._most, dp)
        self._on_size()
        for replica in added:
            self.announce(replica)

    def remove(self, replica: Replica) -> None:
        """Forget the last replica, which is down."""
        assert replica is self.replicas[-1], "dp_ranks would have a hole"
        self.replicas.pop()
        self._on_size()
        self.changed.tell()

    def failing(self, limit: int) -> bool:
        """Whether every replica that is wanted has failed `limit` times in a row."""
        wanted = [each for each in self.replicas if Hold.RETIRING not in each.holds]
        return all(replica.failures >= limit for replica in wanted)

    def _judge(self, replica: Replica, before: ReplicaState) -> None:
        if replica.state is before:
            self.changed.tell()
        else:
            self.announce(replica)
