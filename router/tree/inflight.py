"""Prefixes that are about to be in a replica's cache: booked, not yet confirmed by its feed.

Knows keys, replica numbers and bookings. Each booking counts its own marks, so a
request that ends takes back exactly what it brought. No clocks.
"""

from collections.abc import Iterable, Sequence

from router.tree.search import leading


class Marks:
    """The marks of one booking; `release` takes them back, once."""

    __slots__ = ("_counts", "_keys", "_table")

    def __init__(self, table: dict[int, list[int]], keys: Sequence[int]) -> None:
        self._table = table
        self._keys = keys
        self._counts: list[list[int]] = []
        for key in keys:
            count = table.get(key)
            if count is None:
                count = table[key] = [0]
            count[0] += 1
            self._counts.append(count)

    def release(self) -> None:
        """Take the marks back; those that the feed confirmed are gone already."""
        for key, count in zip(self._keys, self._counts, strict=True):
            count[0] -= 1
            # A mark confirmed and set anew by another booking is another count: leave it.
            if not count[0] and self._table.get(key) is count:
                del self._table[key]
        self._keys, self._counts = (), []


class InFlight:
    """Marks of all replicas."""

    def __init__(self) -> None:
        self._tables: dict[int, dict[int, list[int]]] = {}

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables.values())

    def mark(self, replica: int, keys: Sequence[int]) -> Marks:
        """Note that a booking will bring `keys` to a replica's cache."""
        return Marks(self._tables.setdefault(replica, {}), keys)

    def confirm(self, replica: int, keys: Iterable[int]) -> None:
        """The feed says that the replica stores `keys`: the marks have served."""
        table = self._tables.get(replica)
        if table:
            for key in keys:
                table.pop(key, None)

    def forget(self, replica: int) -> None:
        """Drop all marks of a replica; its bookings may still be released later."""
        table = self._tables.pop(replica, None)
        if table:
            table.clear()

    def depth(self, replica: int, keys: Sequence[int], held: int) -> int:
        """Return how many leading `keys` it holds or will hold, given that it holds `held`."""
        table = self._tables.get(replica)
        if not table:
            return held
        return leading(keys, held, table.__contains__)
