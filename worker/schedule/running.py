"""Requests that hold blocks: who joins, who must give way, what each computes next. Pure."""

from collections.abc import Iterator

from worker.engine.engine import Row
from worker.kvcache.radix import Chain, PrefixCache
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
    def uncached_tokens(self) -> int:
        """Ids that prefills have still to compute."""
        return sum(one.remaining for one in self._members if one.remaining > 1)

    def join(self, sequence: Sequence) -> bool:
        """Admit it with blocks for all its known ids, or change nothing.

        The longest cached prefix is reused, but one id is left to compute. Blocks must
        also suffice for one more of each running request, or it would be retracted at
        once, again and again. With nobody running everything that `check` let in fits.
        """
        if len(self) >= self._limit:
            return False
        cache = self._cache
        chain = cache.open(sequence.keyed, (len(sequence) - 1) // cache.block_tokens)
        wanted = cache.blocks_for(len(sequence))
        if wanted - len(chain.table) + len(self) > cache.available:
            cache.close(chain)
            return False
        cache.grow(chain, wanted)
        sequence.chain = chain
        sequence.computed = len(chain.path) * cache.block_tokens
        self._members.push(sequence)
        return True

    def leave(self, sequence: Sequence) -> None:
        """End its use of blocks; full computed ones stay cached for the next turn."""
        self._cache.close(_chain(sequence))
        sequence.chain = None
        sequence.computed = 0
        self._members.remove(sequence)

    def make_room(self) -> list[Sequence]:
        """Give each decoding request the block of its next id.

        Returns:
            The requests that had to leave for it, the last in order first. The first in
            order never leaves: alone it always fits.
        """
        retracted: list[Sequence] = []
        for sequence in list(self._members):
            while sequence.chain is not None and not self._has_room(sequence):
                victim = self._members.last
                assert victim is not None, "a running request is not among the running"
                assert len(self) > 1, "the last running request has no room"
                self.leave(victim)
                retracted.append(victim)
        return retracted

    def decode_rows(self) -> list[Row]:
        """One row for each request whose last id alone is not computed."""
        return [self._row(one, 1) for one in self._members if one.remaining == 1]

    def prefill_rows(self, budget: int) -> list[Row]:
        """The next chunks of the prefills, first in order first, at most `budget` ids."""
        rows = []
        for sequence in self._members:
            if sequence.remaining > 1 and budget > 0:
                row = self._row(sequence, min(sequence.remaining, budget))
                budget -= len(row.ids)
                rows.append(row)
        return rows

    def computed(self, sequence: Sequence, count: int) -> None:
        """Note that the KV of `count` more ids is there; full blocks go into the cache."""
        sequence.computed += count
        self._cache.store(_chain(sequence), sequence.keyed, sequence.computed)

    def _has_room(self, sequence: Sequence) -> bool:
        return self._cache.grow(_chain(sequence), self._cache.blocks_for(len(sequence)))

    @staticmethod
    def _row(sequence: Sequence, count: int) -> Row:
        start = sequence.computed
        return Row(
            request_id=sequence.request_id,
            ids=sequence.keyed.ids[start : start + count],
            start=start,
            # A copy: the chain may swap a block for an equal one before an engine looks.
            blocks=list(_chain(sequence).table),
            sampled=start + count == len(sequence),
            output_position=sequence.output_tokens,
            sampling=sequence.sampling,
            banned=sequence.banned,
        )


def _chain(sequence: Sequence) -> Chain:
    assert sequence.chain is not None, "a request without blocks is not running"
    return sequence.chain
