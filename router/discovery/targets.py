"""Where members join: worker groups the fleet, text services a pool. Decides nothing."""

from collections.abc import Callable
from typing import Generic, TypeVar

from radixmesh.errors import GroupExists
from router.discovery.member import Member
from router.fleet.group import Group
from router.fleet.registry import Fleet
from router.text.pool import Instance, Pool

InstanceT = TypeVar("InstanceT", bound=Instance)


class GroupTarget:
    """The fleet.

    Args:
        fleet: Of this router.
        drain_s: Seconds that streams of a group that is gone have to finish; then they are
            handed over.
    """

    def __init__(self, fleet: Fleet, *, drain_s: float) -> None:
        self._fleet = fleet
        self._drain_s = drain_s

    def join(self, member: Member) -> Group:
        """Attach a group, by a longer name where its own is taken.

        Raises:
            GroupExists: Another group is at its address.
        """
        try:
            group_id = self._fleet.add_group(member.address, member.name)
        except GroupExists:
            if not member.name:
                raise
            group_id = self._fleet.add_group(member.address, f"{member.name}@{member.address}")
        return self._fleet.groups.get(group_id)

    def present(self, group: Group, /) -> bool:
        """Whether this very group is in the fleet."""
        return self._fleet.groups.find(group.group_id) is group

    def drain(self, group: Group, /) -> None:
        """Send it nothing new; its streams finish. What an administrator wants of it stays."""
        if not group.drained:
            self._fleet.drain_group(group.group_id)

    def undrain(self, group: Group, /) -> None:
        """Send it requests again."""
        if group.drained:
            self._fleet.add_group(group.address, group.group_id)

    def retire(self, group: Group, /) -> None:
        """Send it nothing new; it leaves when its streams have finished or were handed over."""
        self._fleet.drain_group(group.group_id, remove=True, within_s=self._drain_s)

    def remove(self, group: Group, /) -> None:
        """Detach it; its streams go on elsewhere."""
        self._fleet.remove_group(group.group_id)


class PoolTarget(Generic[InstanceT]):
    """A pool of text services.

    Args:
        pool: Of one service.
        make: Makes an instance at an address.
    """

    def __init__(self, pool: Pool[InstanceT], make: Callable[[str], InstanceT]) -> None:
        self._pool = pool
        self._make = make

    def join(self, member: Member) -> InstanceT:
        """Add an instance, or take back one that is leaving.

        Raises:
            GroupExists: One is at its address.
        """
        instance = self._pool.at(member.address)
        if instance is None:
            instance = self._make(member.address)
            self._pool.add(instance)
        elif self._pool.leaves(instance):
            self._pool.undrain(instance)
        else:
            raise GroupExists(f"{member.address} is known already")
        return instance

    def present(self, instance: InstanceT, /) -> bool:
        """Whether this very instance is in the pool."""
        return instance in self._pool

    def drain(self, instance: InstanceT, /) -> None:
        """Ask it nothing new."""
        self._pool.drain(instance)

    def undrain(self, instance: InstanceT, /) -> None:
        """Ask it again."""
        self._pool.undrain(instance)

    def retire(self, instance: InstanceT, /) -> None:
        """Ask it nothing new; it leaves when it has answered what it was asked."""
        self._pool.retire(instance)

    def remove(self, instance: InstanceT, /) -> None:
        """Take it out; what it has goes on elsewhere."""
        self._pool.remove(instance)
