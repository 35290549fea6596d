"""Requests that wait for a place, and who of them may have the next one. Pure.

The queue stands by priority, then by arrival, so one that was retracted stands
before later arrivals. Within a priority streams that have begun go first and then
those who have waited long, both by arrival; the others go by the prefix that the
cache holds of them. As everybody gets old, nobody starves.
"""

from collections.abc import Sequence as Keys
from itertools import islice
from typing import Final

from worker.kvcache.radix import PrefixCache
from worker.schedule.expected import Expected
from worker.schedule.limits import Limits
from worker.schedule.ordered import Ordered
from worker.schedule.sequence import Sequence

# So many at the head of the queue are looked at in one step, however long it is.
WINDOW: Final = 32


class WaitingQueue(Ordered):
    """The queue, and how many ids it will have to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.uncached_tokens = 0
        self._expected = Expected()

    def expects(self, keys: Keys[int], held: int) -> int:
        """Return how many leading `keys` are held, or will be brought by those who wait."""
        return self._expected.depth(keys, held)

    def push(self, sequence: Sequence) -> None:
        """Queue it at its place."""
        super().push(sequence)
        self.uncached_tokens += sequence.uncached
        self._expected.add(sequence.brings)

    def remove(self, sequence: Sequence) -> None:
        """Take it out; `uncached` is what it was when it was queued."""
        super().remove(sequence)
        self.uncached_tokens -= sequence.uncached
        self._expected.remove(sequence.brings)

    def candidates(self, cache: PrefixCache, limits: Limits, now_us: int) -> list[Sequence]:
        """Return who may go next, in order."""
        window = list(islice(self, WINDOW))
        if limits.prefix_first and len(window) > 1:
            oldest_us = now_us - limits.ageing_us
            window.sort(key=lambda one: _rank(one, cache, oldest_us))
        return window


def _rank(sequence: Sequence, cache: PrefixCache, oldest_us: int) -> tuple[int, int, int]:
    urgency, arrival = sequence.order
    if sequence.accepted_us <= oldest_us or sequence.started or sequence.output_tokens:
        return urgency, -(1 << 62), arrival
    cached = cache.probed_blocks(sequence.keyed, sequence.reusable_blocks)
    return urgency, -cached, arrival
