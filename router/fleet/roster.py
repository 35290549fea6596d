"""The groups of a router: who is in the fleet, and a task for each one's link. Chooses nothing."""

import asyncio
from collections.abc import Callable, Iterator

from radixmesh.errors import GroupExists, GroupNotFound
from router.fleet.group import Group, GroupAddress


class Roster:
    """Groups by name. Their links run between `start` and `stop`.

    Args:
        make: Makes a group at an address.
    """

    def __init__(self, make: Callable[[GroupAddress], Group]) -> None:
        self._make = make
        self._groups: dict[str, Group] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._runs: dict[str, asyncio.Task[None]] = {}

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
        """Attach a group.

        Raises:
            GroupExists: Its name or its address is in the fleet already.
        """
        known = self._groups.values()
        if where.group_id in self._groups or any(where.address == one.address for one in known):
            raise GroupExists(f"{where.group_id} at {where.address} is in the fleet already")
        group = self._groups[where.group_id] = self._make(where)
        self._run(group)
        return group

    def remove(self, group_id: str) -> None:
        """Detach a group; it is closed when its link has ended.

        Raises:
            GroupNotFound: There is none of that name.
        """
        group = self.get(group_id)
        del self._groups[group_id]
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
