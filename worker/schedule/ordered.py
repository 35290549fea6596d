"""Requests in the order in which they go: by priority, then by arrival. Pure."""

import bisect
from collections.abc import Iterator

from worker.schedule.sequence import Sequence


class Ordered:
    """A sorted set of requests that also lets go of those in its middle."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._sequences}>"

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @property
    def first(self) -> Sequence | None:
        """Who goes before all others."""
        return self._sequences[0] if self._sequences else None

    @property
    def last(self) -> Sequence | None:
        """Who goes after all others."""
        return self._sequences[-1] if self._sequences else None

    def push(self, sequence: Sequence) -> None:
        """Put it at its place."""
        bisect.insort(self._sequences, sequence, key=lambda one: one.order)

    def remove(self, sequence: Sequence) -> None:
        """Take it out, wherever it stands. It is in."""
        index = bisect.bisect_left(self._sequences, sequence.order, key=lambda one: one.order)
        assert self._sequences[index] is sequence, "removed a request that is not in"
        del self._sequences[index]
