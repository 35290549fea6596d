"""Groups that turn out to be one process, reached at two addresses: only one of them gets work.

Knows who said hello where; no link, no replica. The first that said it is kept, unless it is
drained; when it goes, the next one takes its place.
"""

import logging
from typing import Protocol

logger = logging.getLogger(__name__)


class Twin(Protocol):
    """A group, as far as it may be another one's twin."""

    @property
    def group_id(self) -> str:
        """Its name."""

    @property
    def drained(self) -> bool:
        """Whether somebody wants no new requests there."""

    @property
    def duplicate_of(self) -> str:
        """The name of the group that gets the work in its place; empty: none does."""

    def stand_back(self, for_group: str) -> None:
        """Leave new work to another group; empty: take it again."""


class Instances:
    """Which groups are which process. Costs nothing where no process is met twice."""

    def __init__(self) -> None:
        self._groups: dict[str, list[Twin]] = {}
        self._of: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._of)

    def met(self, group: Twin, instance_id: str) -> None:
        """A group said who it is; an empty name means that nobody is there any more."""
        self._part(group)
        if instance_id:
            self._of[id(group)] = instance_id
            self._groups.setdefault(instance_id, []).append(group)
            self._settle(instance_id)
        elif group.duplicate_of:
            group.stand_back("")

    def reconsider(self, group: Twin) -> None:
        """A group was drained, or is no longer."""
        instance_id = self._of.get(id(group))
        if instance_id is not None:
            self._settle(instance_id)

    def _part(self, group: Twin) -> None:
        instance_id = self._of.pop(id(group), None)
        if instance_id is None:
            return
        left = self._groups[instance_id]
        left.remove(group)
        if left:
            self._settle(instance_id)
        else:
            del self._groups[instance_id]

    def _settle(self, instance_id: str) -> None:
        groups = self._groups[instance_id]
        kept = next((group for group in groups if not group.drained), groups[0])
        for group in groups:
            leader = "" if group is kept else kept.group_id
            if group.duplicate_of == leader:
                continue
            group.stand_back(leader)
            if leader:
                logger.warning(
                    "the same worker group at two addresses",
                    extra={"group": group.group_id, "kept": leader, "instance": instance_id},
                )
