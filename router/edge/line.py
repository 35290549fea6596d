"""The order of those who wait: by class, then by arrival, and nobody for ever.

The head is the oldest of the highest class. After `PASSED_LIMIT` departures that each
passed over an older one of a lower class, the head is the oldest of all, until it has
left. So one that came when n were waiting leaves after at most
(PASSED_LIMIT + 1) * (n + 1) departures, whoever comes later. Who looks at the head only,
and waits until it can go, lets nobody overtake it.

Pure: knows classes and order; nothing of what is waited for, no clock, no loop.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

PASSED_LIMIT: Final = 7


class Waiter(Protocol):
    """Somebody in the line."""

    @property
    def priority(self) -> int:
        """The class; higher ones go first."""
        ...


W = TypeVar("W", bound=Waiter)


class Line(Generic[W]):
    """Those who wait. Every operation takes constant time, but for the number of classes."""

    def __init__(self) -> None:
        self._all: OrderedDict[W, None] = OrderedDict()
        self._classes: dict[int, OrderedDict[W, None]] = {}
        self._passed = 0

    def __repr__(self) -> str:
        sizes = ", ".join(f"{key}: {len(self._classes[key])}" for key in sorted(self._classes))
        return f"<Line {{{sizes}}}>"

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, waiter: object) -> bool:
        return waiter in self._all

    def __iter__(self) -> Iterator[W]:
        return iter(self._all)

    def add(self, waiter: W) -> None:
        """Stand behind all others of the same class."""
        self._all[waiter] = None
        self._classes.setdefault(waiter.priority, OrderedDict())[waiter] = None

    def head(self) -> W | None:
        """Return who goes next; None when nobody waits."""
        if not self._all:
            return None
        if self._passed >= PASSED_LIMIT:
            return next(iter(self._all))
        return next(iter(self._classes[max(self._classes)]))

    def pop(self) -> W:
        """Let the head go.

        Raises:
            LookupError: Nobody waits.
        """
        head = self.head()
        if head is None:
            raise LookupError("nobody waits")
        self._passed = 0 if head is next(iter(self._all)) else self._passed + 1
        self.remove(head)
        return head

    def remove(self, waiter: W) -> None:
        """Let one go who gives up.

        Raises:
            KeyError: It does not wait.
        """
        del self._all[waiter]
        same = self._classes[waiter.priority]
        del same[waiter]
        if not same:
            del self._classes[waiter.priority]
