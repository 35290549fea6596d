"""Requests that hold blocks: who joins, who must give way, what each computes next. Pure."""

from collections.abc import Iterator
from collections.abc import Sequence as Keys

from worker.kvcache.radix import Chain, PrefixCache
from worker.schedule.expected import common
from worker.schedule.ordered import Ordered
from worker.schedule.sequence import Sequence


class RunningBatch:
    """The running requests of a replica and their use of the KV cache."""

    def __init__(self, cache: PrefixCache, *, limit: int) -> None:
        self._cache = cache
        self._limit = limit
        self._members = Ordered()

    def __repr__(self) -> str:
        return f"<RunningBatch {len(self)} of {self._limit}>"

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    @property
    def full(self) -> bool:
        """Whether there is no place for one more."""
        return len(self) >= self._limit

    @property
    def last(self) -> Sequence | None:
        """Who gives way first: of the lowest priority the latest."""
        return self._members.last

    @property
    def uncached_tokens(self) -> int:
        """Ids that prefills have still to compute."""
        total = 0
        for one in self._members:
            remaining = one.remaining
            if remaining > 1:
                total += remaining
        return total

    def brings(self, keys: Keys[int], held: int) -> int:
        """Return how many leading `keys` are held, or will be brought by prefills that run."""
        prefills = (one.keyed.keys for one in self._members if one.remaining > 1)
        return max((common(keys, others, held) for others in prefills), default=held)

    def join(self, sequence: Sequence) -> bool:
        """Admit it with blocks for all its known ids, or change nothing.

        The longest cached prefix is reused, as far as the request may. Blocks must also
        suffice for one more of each running request, or it would be retracted at once,
        again and again. With nobody running everything that `check` let in fits.
        """
        if self.full:
            return False
        cache = self._cache
        chain = cache.open(sequence.keyed, sequence.reusable_blocks)
        wanted = cache.blocks_for(len(sequence))
        if wanted - len(chain.table) + len(self) > cache.available:
            cache.close(chain)
            return False
        cache.grow(chain, wanted)
        sequence.chain = chain
        sequence.computed = sequence.planned = len(chain.path) * cache.block_tokens
        sequence.residence += 1
        self._members.push(sequence)
        return True

    def fits_without_lower(self, sequence: Sequence) -> bool:
        """Whether it could join if all of lower priority were gone.

        Blocks that those share count twice, so the answer may be too hopeful, never the
        other way.
        """
        urgency = sequence.order[0]
        lower = [one for one in self._members if one.order[0] > urgency]
        freed = sum(len(chain_of(one).table) for one in lower)
        cached = self._cache.probed_blocks(sequence.keyed, sequence.reusable_blocks)
        wanted = self._cache.blocks_for(len(sequence)) - cached + len(self) - len(lower)
        return bool(lower) and wanted <= self._cache.available + freed

    def leave(self, sequence: Sequence) -> None:
        """End its use of blocks; full computed ones stay cached for the next turn.

        What steps under way compute and draw for it is no longer its own.
        """
        self._cache.close(chain_of(sequence))
        sequence.chain = None
        sequence.computed = sequence.planned = sequence.pending = 0
        self._members.remove(sequence)

    def make_room(self) -> list[Sequence]:
        """Give each request the blocks of its known and pending ids.

        Returns:
            The requests that had to leave for it, the last in order first. The first in
            order never leaves: alone it always fits.
        """
        retracted: list[Sequence] = []
        block_tokens = self._cache.block_tokens
        for sequence in list(self._members):
            chain = sequence.chain
            length = len(sequence.keyed.ids) + sequence.pending
            if chain is not None and length > len(chain.table) * block_tokens:
                self._make_room_for(sequence, retracted)
        return retracted

    def computed(self, sequence: Sequence, count: int) -> None:
        """Note that the KV of `count` more ids is there; full blocks go into the cache."""
        sequence.computed += count
        chain = chain_of(sequence)
        if sequence.computed >= (len(chain.path) + 1) * self._cache.block_tokens:
            self._cache.store(chain, sequence.keyed, sequence.computed)

    def keys_under_way(self) -> set[int]:
        """Return the key of the next block that each running request puts into the cache."""
        return {chain_of(one).stores_next(one.keyed) for one in self._members} - {0}

    def _make_room_for(self, sequence: Sequence, retracted: list[Sequence]) -> None:
        if not sequence.goes_on:
            return  # Its pending id is its last, and is never computed.
        wanted = self._cache.blocks_for(len(sequence) + sequence.pending)
        while sequence.chain is not None and not self._cache.grow(sequence.chain, wanted):
            victim = self._members.last
            assert victim is not None, "a running request is not among the running"
            assert len(self) > 1, "the last running request has no room"
            self.leave(victim)
            retracted.append(victim)


def chain_of(sequence: Sequence) -> Chain:
    """Return the blocks of a running request."""
    assert sequence.chain is not None, "a request without blocks is not running"
    return sequence.chain
