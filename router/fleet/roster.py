"""The groups of a router: who is in the fleet, and a task for each one's link. Chooses nothing.

Every call costs the same, however many groups there are; only `tick` walks, and only those
that are to leave.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from radixmesh.errors import GroupExists, GroupNotFound
from router.fleet.group import Group, GroupAddress
from router.fleet.instances import Instances

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leave:
    """What is wanted of a drained group besides that it gets nothing new.

    Attributes:
        remove: Detach it when it is idle.
        deadline: The instant at which what still runs there is handed over.
    """

    remove: bool = False
    deadline: float = math.inf


class Roster:
    """Groups by name. Their links run between `start` and `stop`.

    Args:
        make: Makes a group at an address.
    """

    def __init__(self, make: Callable[[GroupAddress], Group]) -> None:
        self._make = make
        self._groups: dict[str, Group] = {}
        self._at: dict[str, Group] = {}
        self._leaving: dict[str, Leave] = {}
        self._instances = Instances()
        self._tasks: asyncio.TaskGroup | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        """All groups, as they are now; any thread may look."""
        return iter(list(self._groups.values()))

    @property
    def connected(self) -> int:
        """How many are connected."""
        return sum(group.link.connected for group in self)

    @property
    def entries(self) -> int:
        """Entries that are open, at all of them."""
        return sum(len(group.link.entries) for group in self)

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes, to all of them."""
        return sum(group.link.pending_bytes for group in self)

    def find(self, group_id: str) -> Group | None:
        """Return a group, or None when there is none of that name."""
        return self._groups.get(group_id)

    def get(self, group_id: str) -> Group:
        """Return a group.

        Raises:
            GroupNotFound: There is none of that name.
        """
        group = self.find(group_id)
        if group is None:
            raise GroupNotFound(f"there is no group {group_id!r}")
        return group

    def add(self, where: GroupAddress) -> Group:
        """Attach a group; one that is drained, of this name and at this address, is undrained.

        Raises:
            GroupExists: Its name or its address is in the fleet already.
        """
        known = self._groups.get(where.group_id) or self._at.get(where.address)
        if known is None:
            return self._attach(where)
        if not known.drained or (known.group_id, known.address) != (where.group_id, where.address):
            raise GroupExists(f"{where.group_id} at {where.address} is in the fleet already")
        self._leaving.pop(known.group_id, None)
        known.undrain()
        self._instances.reconsider(known)
        logger.info("group undrained", extra={"group": known.group_id})
        return known

    def _attach(self, where: GroupAddress) -> Group:
        group = self._groups[where.group_id] = self._at[where.address] = self._make(where)
        group.on_instance = self._instances.met
        self._run(group)
        return group

    def drain(self, group_id: str, wish: Leave) -> int:
        """Send nothing new to a group; return how many requests of this router run there.

        Raises:
            GroupNotFound: There is none of that name.
        """
        group = self.get(group_id)
        group.drain()
        self._instances.reconsider(group)
        self._leaving[group_id] = wish
        running = group.in_flight
        if wish.remove and group.idle:
            self.remove(group_id)
        return running

    def tick(self, now: float) -> None:
        """Hand over what drained groups still have when their time is over; remove idle ones."""
        for group_id, wish in list(self._leaving.items()):
            group = self._groups[group_id]
            if now >= wish.deadline and not group.idle:
                logger.info("handing over", extra={"group": group_id, "running": group.in_flight})
                group.hand_over()
            if wish.remove and group.idle:
                logger.info("group left", extra={"group": group_id})
                self.remove(group_id)

    def remove(self, group_id: str) -> None:
        """Detach a group; it is closed when its link has ended.

        Raises:
            GroupNotFound: There is none of that name.
        """
        group = self.get(group_id)
        del self._groups[group_id], self._at[group.address]
        self._leaving.pop(group_id, None)
        group.on_instance = _nobody_cares
        self._instances.met(group, "")
        group.depart()
        run = self._runs.pop(group_id, None)
        if run is None:
            group.close()
        else:
            run.add_done_callback(lambda _: group.close())
            run.cancel()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Keep the links of all groups up, of those to come too."""
        self._tasks = tasks
        for group in self:
            self._run(group)

    def stop(self) -> None:
        """The tasks have ended."""
        self._tasks = None
        self._runs.clear()

    def _run(self, group: Group) -> None:
        if self._tasks is not None:
            self._runs[group.group_id] = self._tasks.create_task(group.link.run())


def _nobody_cares(group: Group, instance_id: str) -> None:
    """Of a group that has left, nobody cares who it is."""
