"""What a feed said too early: changes that wait for what comes before them, boundedly many.

Knows sequence numbers and sizes; not what a change does.
"""

from router.fleet.changes import Change, Digest

HELD_KEYS_LIMIT = 1 << 17


class Held:
    """Changes by number, and the last digest.

    Attributes:
        size: Keys and changes together, at most `HELD_KEYS_LIMIT`.
        digest: To be looked at after all changes; None: none came.
    """

    def __init__(self) -> None:
        self.size = 0
        self.digest: Digest | None = None
        self._changes: dict[int, Change] = {}

    def __bool__(self) -> bool:
        return bool(self._changes)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._changes

    def add(self, sequence: int, change: Change) -> None:
        """Hold a change back; over the limit everything is forgotten, which leaves a gap."""
        if sequence in self._changes:
            return  # it came twice
        self.size += len(change.keys) + 1
        if self.size > HELD_KEYS_LIMIT:
            self.clear()
            return
        self._changes[sequence] = change

    def pop(self, sequence: int) -> Change:
        """Return a change whose turn has come, and hold it no more."""
        change = self._changes.pop(sequence)
        self.size -= len(change.keys) + 1
        return change

    def in_order(self) -> list[tuple[int, Change]]:
        """Return all changes by number."""
        return sorted(self._changes.items())

    def clear(self) -> None:
        """Forget all of it."""
        self._changes, self.size, self.digest = {}, 0, None
