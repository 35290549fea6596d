"""Marks: prefixes that are about to be in a replica's cache, booked and not yet there.

Knows keys, replica numbers, the bits by which the index names replicas, and bookings. Each
booking counts its own marks, so one that ends takes back exactly what it brought, and a
mark goes for all when its block is stored. No clocks.
"""

from collections.abc import Collection, Iterable, Sequence

_COUNT_BITS = 24
_COUNT = (1 << _COUNT_BITS) - 1


class Marks:
    """The marks of one booking; `release` takes them back, once."""

    __slots__ = ("_age", "_keys", "_place")

    def __init__(self, place: "_Place", keys: Sequence[int]) -> None:
        self._place = place
        self._keys = keys
        self._age = place.add(self, keys)

    def release(self) -> None:
        """Take the marks back; those whose blocks have come are gone already."""
        self._place.take_back(self, self._keys, self._age)
        self._keys = ()

    def left(self) -> list[int]:
        """Return the keys of blocks that have not come yet."""
        return self._place.left(self._keys, self._age)

    def move(self, place: "_Place", keys: Sequence[int]) -> None:
        """These keys are what is left, and they are expected at another place now."""
        self._keys, self._place = keys, place
        self._age = place.add(self, self._keys)


class _Place:
    """The marks at one replica.

    A mark is a count of bookings and the age of the first of them, in one number: a booking
    counts at a mark that is as old as itself or older. One that was set anew after it had
    served is younger, so who booked before has no part in it.
    """

    __slots__ = ("_age", "_table", "bit", "bookings", "marks")

    def __init__(self, table: dict[int, int], bit: int) -> None:
        self._table = table
        self._age = 0
        self.bit = bit
        self.marks: dict[int, int] = {}
        self.bookings: dict[Marks, None] = {}

    def add(self, booking: Marks, keys: Sequence[int]) -> int:
        """Count a booking at each of these keys; return its age."""
        self.bookings[booking] = None
        self._age += 1
        first = self._age << _COUNT_BITS
        if self.marks.keys().isdisjoint(keys):
            self.marks.update(dict.fromkeys(keys, first + 1))
        else:
            for key in keys:
                self.marks[key] = self.marks.get(key, first) + 1
        table, bit = self._table, self.bit
        if table.keys().isdisjoint(keys):
            table.update(dict.fromkeys(keys, bit))
        else:
            for key in keys:
                table[key] = table.get(key, 0) | bit
        return self._age

    def left(self, keys: Iterable[int], age: int) -> list[int]:
        """Return at which of its keys a booking of that age still counts."""
        after = age + 1 << _COUNT_BITS
        return [key for key in keys if self.marks.get(key, after) < after]

    def take_back(self, booking: Marks, keys: Iterable[int], age: int) -> None:
        """Count a booking no more."""
        self.bookings.pop(booking, None)
        for key in self.left(keys, age):
            mark = self.marks[key] - 1
            if mark & _COUNT:
                self.marks[key] = mark
            else:
                self.drop(key)

    def drop(self, key: int) -> None:
        """A mark goes for all bookings."""
        del self.marks[key]
        mask = self._table[key] & ~self.bit
        if mask:
            self._table[key] = mask
        else:
            del self._table[key]

    def clear(self) -> None:
        """All marks go."""
        for key in list(self.marks):
            self.drop(key)
        self.bookings.clear()


class MarkTable:
    """The marks of all replicas.

    Attributes:
        masks: Key -> the bits of the replicas where it is marked.
    """

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._places: dict[int, _Place] = {}

    def __len__(self) -> int:
        """Marked blocks, each counted once for each replica."""
        return sum(len(place.marks) for place in self._places.values())

    def bits(self) -> int:
        """Return the bits of all replicas that have marks."""
        bits = 0
        for place in self._places.values():
            if place.marks:
                bits |= place.bit
        return bits

    def mark(self, replica: int, bit: int, keys: Sequence[int]) -> Marks:
        """A booking will bring `keys` to a replica's cache."""
        place = self._places.get(replica)
        if place is None:
            place = self._places[replica] = _Place(self.masks, bit)
        return Marks(place, keys)

    def confirm(self, replica: int, keys: Collection[int]) -> None:
        """The replica stores `keys`: their marks have served."""
        place = self._places.get(replica)
        if place is None or place.marks.keys().isdisjoint(keys):
            return
        for key in keys:
            if key in place.marks:
                place.drop(key)

    def move(self, replica: int, bit: int) -> None:
        """The replica's bit is another one now."""
        old = self._places.pop(replica, None)
        if old is None:
            return
        left = [(booking, booking.left()) for booking in old.bookings]
        old.clear()
        place = self._places[replica] = _Place(self.masks, bit)
        for booking, keys in left:
            booking.move(place, keys)

    def forget(self, replica: int) -> None:
        """Drop all marks of a replica; its bookings may still be released later."""
        place = self._places.pop(replica, None)
        if place is not None:
            place.clear()
