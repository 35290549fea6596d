"""Who of the waiting requests joins the running ones in a step. Pure.

A request joins when the step has ids left for it, there is a place, and its blocks
are free; for one of higher priority the last of a lower one gives way. Who finds
the next block of its prefix being computed by a running request waits for it, so a
prefix that many share is computed once.
"""

from collections.abc import Callable

from worker.kvcache.radix import PrefixCache
from worker.schedule.limits import Limits
from worker.schedule.running import RunningBatch, chain_of
from worker.schedule.sequence import Sequence
from worker.schedule.waiting import WaitingQueue


class Admission:
    """One replica's door, from the queue to the running batch."""

    def __init__(
        self,
        limits: Limits,
        cache: PrefixCache,
        waiting: WaitingQueue,
        running: RunningBatch,
        *,
        on_joined: Callable[[Sequence], None],
        on_retracted: Callable[[Sequence], None],
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._waiting = waiting
        self._running = running
        self._on_joined = on_joined
        self._on_retracted = on_retracted

    def __repr__(self) -> str:
        return f"<Admission {self._waiting} to {self._running}>"

    def admit(self, now_us: int) -> None:
        """Let in whom the next step has work for.

        Nobody overtakes who does not fit: it would never fit. Who waits for a sibling
        may be overtaken, as it holds nobody up.
        """
        while self._may_admit() and self._admit_some(now_us):
            pass

    def _admit_some(self, now_us: int) -> bool:
        """Let in of those at the head of the queue; return whether all of them are in."""
        candidates = self._waiting.candidates(self._cache, self._limits, now_us)
        under_way = self._running.keys_under_way()
        urgency, work = 0, -1
        joined = 0
        for candidate in candidates:
            if work < 0 or candidate.order[0] != urgency:
                urgency = candidate.order[0]
                work = self._work_before(urgency)
            if work >= self._limits.max_batched_tokens:
                return False
            if self._waits_for_sibling(candidate, under_way, now_us):
                continue
            if not self._join(candidate):
                return False
            work += candidate.remaining
            under_way.add(chain_of(candidate).stores_next(candidate.keyed))
            self._waiting.remove(candidate)
            self._on_joined(candidate)
            joined += 1
        return joined == len(candidates)

    def _may_admit(self) -> bool:
        # Cheap, so that a full replica does not look at its queue in every step.
        first, last = self._waiting.first, self._running.last
        if first is None:
            return False
        if last is not None and last.order[0] > first.order[0]:
            return True
        if self._running.full or len(self._running) >= self._cache.available:
            return False
        return self._work_before(first.order[0]) < self._limits.max_batched_tokens

    def _work_before(self, urgency: int) -> int:
        """Ids that the step computes before it comes to one who joins now."""
        return sum(one.remaining for one in self._running if one.order[0] <= urgency)

    def _waits_for_sibling(self, sequence: Sequence, under_way: set[int], now_us: int) -> bool:
        if not under_way:
            return False
        usable = min(sequence.reusable_blocks, len(sequence.keyed.keys))
        cached = self._cache.probed_blocks(sequence.keyed, usable)
        if cached >= usable or sequence.keyed.keys[cached] not in under_way:
            return False
        # It waits as long as the sibling gets on, and for one that does not only so long.
        if cached != sequence.waits_at:
            sequence.waits_at = cached
            sequence.waits_since_us = now_us
        return now_us - sequence.waits_since_us < self._limits.ageing_us

    def _join(self, sequence: Sequence) -> bool:
        running = self._running
        if running.join(sequence):
            return True
        if not running.fits_without_lower(sequence):
            return False
        while (last := running.last) is not None and last.order[0] > sequence.order[0]:
            running.leave(last)
            self._on_retracted(last)
            if running.join(sequence):
                return True
        return False
