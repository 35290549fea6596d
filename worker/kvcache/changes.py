"""Changes of the prefix cache, in order, merged into runs. Knows keys only."""

from worker.request import CacheChange


class ChangeLog:
    """What happened since the last `take`. A following run joins the one before it."""

    def __init__(self) -> None:
        self._changes: list[CacheChange] = []

    def stored(self, parent: int, key: int) -> None:
        """Record that `key` was stored below `parent` (0: the first block of a prompt)."""
        last = self._changes[-1] if self._changes else None
        if last is not None and parent and last.stored and last.stored[-1] == parent:
            last.stored.append(key)
        else:
            self._changes.append(CacheChange(parent=parent, stored=[key]))

    def removed(self, key: int) -> None:
        """Record that `key` left; its children have left before."""
        last = self._changes[-1] if self._changes else None
        if last is not None and last.removed:
            last.removed.append(key)
        else:
            self._changes.append(CacheChange(removed=[key]))

    def cleared(self) -> None:
        """Record that everything left. What was recorded before it is no longer worth saying."""
        self._changes = [CacheChange(cleared=True)]

    def take(self) -> list[CacheChange]:
        """Return the changes and forget them."""
        changes, self._changes = self._changes, []
        return changes
