"""The meta-tree: which replica holds which prefix.

Knows block keys and replica numbers; refuses to know clocks, sockets, load and
how far a view is trusted. A key names a whole prefix, so one map from key to a
bitmask of replicas is a prefix tree. A replica that holds a block holds its
ancestors, so how deep it matches is found by binary search.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from router.tree.branches import Branches

BYTES_PER_KEY = 144  # measured: two map entries, the key and its share of leaves and masks
DEFAULT_BUDGET_BYTES = 512 * 2**20
_MASKS_LIMIT = 1 << 16
_SWEEP_PER_KEY = 4  # each stored key pays for this many keys of a sweep
_COMPACT_ABOVE = 1024


class FeedBroken(Exception):
    """A change contradicts what the replica said before; its view must be dropped."""


@dataclass(slots=True)
class _Holding:
    """What one replica holds: its bit, and the digest of all its events."""

    slot: int
    bit: int
    block_count: int = 0
    xor_keys: int = 0
    marked: bool = False  # whether masks may contain the bit


class MetaTree:
    """The prefixes of all replicas, in bounded memory.

    Replica numbers come from `join` and are never reused. Inside, a replica owns a
    bit of the masks; when it is cleared its bit leaves the live mask at once, and
    the bit is given to another only after a sweep has taken it out of all masks.

    Args:
        budget_bytes: Over it, the oldest branches go.
        on_evicted: Told how many blocks the budget dropped.
    """

    def __init__(
        self,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        on_evicted: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._limit = max(1, budget_bytes // BYTES_PER_KEY)
        self._on_evicted = on_evicted
        self._holders: dict[int, int] = {}
        self._branches = Branches()
        self._masks: dict[int, int] = {}
        self._replicas: dict[int, _Holding] = {}
        self._owners: dict[int, int] = {}  # bit -> replica, live ones only
        self._next_replica = 1
        self._free_slots: list[int] = []
        self._slot_count = 0
        self._live = 0
        self._partial = 0
        self._dead = 0
        self._sweeping = 0
        self._sweep_keys: list[int] = []
        self._peak = 0

    def __len__(self) -> int:
        """Keys in the index, those that only a swept-to-be replica holds included."""
        return len(self._holders)

    def __repr__(self) -> str:
        return f"<MetaTree of {len(self)} keys, {len(self._replicas)} replicas>"

    @property
    def slot_count(self) -> int:
        """Width of the masks in bits: replicas that live or wait for their sweep, at the most."""
        return self._slot_count

    def join(self) -> int:
        """Return the number of a new replica, which holds nothing."""
        replica = self._next_replica
        self._next_replica += 1
        self._replicas[replica] = self._take_slot(replica)
        return replica

    def leave(self, replica: int) -> None:
        """Forget a replica for good. Its number is never used again."""
        self._retire(self._replicas.pop(replica))

    def clear(self, replica: int) -> None:
        """The replica holds nothing any more, from now on; its digest starts anew."""
        self._retire(self._replicas[replica])
        self._replicas[replica] = self._take_slot(replica)

    def store(self, replica: int, parent: int, keys: Iterable[int]) -> None:
        """The replica now holds `keys`, each the parent of the next, below `parent` (0: none).

        Raises:
            FeedBroken: It doesn't hold the parent, or holds one of the keys already.
        """
        self._store_run(self._replicas[replica], parent, keys)
        self._shrink()

    def store_pairs(self, replica: int, keys: Sequence[int], parents: Sequence[int]) -> None:
        """The replica holds `keys`, each below the parent at the same index, parents first.

        Raises:
            FeedBroken: As for `store`, or the columns differ in length.
        """
        if len(keys) != len(parents):
            raise FeedBroken(f"{len(keys)} keys with {len(parents)} parents")
        held = self._replicas[replica]
        start = 0
        for index in range(1, len(keys) + 1):
            if index == len(keys) or parents[index] != keys[index - 1]:
                self._store_run(held, parents[start], keys[start:index])
                start = index
        self._shrink()

    def remove(self, replica: int, keys: Iterable[int]) -> None:
        """The replica no longer holds `keys`; children come before parents.

        Raises:
            FeedBroken: It does not hold one of them.
        """
        held = self._replicas[replica]
        for key in keys:
            mask = self._holders.get(key, 0)
            if mask & held.bit:
                self._assign(key, mask & ~held.bit)
            elif not self._partial & held.bit:
                raise FeedBroken("removed a block that is not there")
            held.block_count -= 1
            held.xor_keys ^= key

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        """Return how many of the leading `keys` each replica holds; none that holds none."""
        if not keys:
            return {}
        holders = self._holders.get
        depths: dict[int, int] = {}
        first = holders(keys[0], 0) & self._live
        # Spans (low, mask at low, high, mask at high): bits lost between have their depth there.
        spans = [(0, first, len(keys), 0)] if first else []
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            lost = low_mask & ~high_mask
            if high - low == 1:
                self._note(depths, lost, high)
                continue
            middle = (low + high) // 2
            mask = holders(keys[middle], 0) & low_mask | high_mask
            if mask != high_mask:
                spans.append((middle, mask, high, high_mask))
            if mask != low_mask:
                spans.append((low, low_mask, middle, mask))
        if depths:
            self._branches.touch(keys[max(depths.values()) - 1])
        return depths

    def digest(self, replica: int) -> tuple[int, int]:
        """Return (block count, xor of keys) over all events, dropped keys included."""
        held = self._replicas[replica]
        return held.block_count, held.xor_keys

    def is_partial(self, replica: int) -> bool:
        """Whether the budget dropped some of the replica's keys."""
        return bool(self._partial & self._replicas[replica].bit)

    def keys_of(self, replica: int) -> set[int]:
        """All indexed keys of a replica. Walks the whole index; for proofs and tests."""
        bit = self._replicas[replica].bit
        return {key for key, mask in self._holders.items() if mask & bit}

    def sweep(self, limit: int) -> bool:
        """Take retired replicas out of up to `limit` masks; return whether all is done."""
        if not self._sweep_keys and not self._start_sweep():
            return True
        dying, keys = self._sweeping, self._sweep_keys
        for _ in range(min(limit, len(keys))):
            # From the end: children were added after their parents, so they go first.
            key = keys.pop()
            mask = self._holders.get(key, 0)
            if mask & dying:
                self._assign(key, mask & ~dying)
        if not keys:
            self._end_sweep()
        return not self._dead

    def _store_run(self, held: _Holding, parent: int, keys: Iterable[int]) -> None:
        holders, bit = self._holders, held.bit
        indexed = not parent or bool(holders.get(parent, 0) & bit)
        if not indexed and not self._partial & bit:
            raise FeedBroken("stored a block below a parent that is not there")
        held.marked = True
        count, xor = 0, 0
        for key in keys:
            if not key:
                raise FeedBroken("a block has no key")
            if indexed:
                self._add(key, parent, bit)
                parent = key
            count += 1
            xor ^= key
        held.block_count += count
        held.xor_keys ^= xor
        if self._dead:
            self.sweep(count * _SWEEP_PER_KEY)

    def _add(self, key: int, parent: int, bit: int) -> None:
        mask = self._holders.get(key)
        if mask is None:
            self._branches.add(key, parent)
            mask = 0
        elif mask & bit:
            raise FeedBroken("stored a block that is there already")
        self._holders[key] = self._intern(mask | bit)

    def _assign(self, key: int, mask: int) -> None:
        if mask:
            self._holders[key] = self._intern(mask)
            return
        self._holders[key] = 0
        # A key without holders stays while children hang below it, and goes with the last one.
        while key and self._branches.is_leaf(key) and not self._holders[key]:
            del self._holders[key]
            key = self._branches.drop(key)

    def _intern(self, mask: int) -> int:
        if len(self._masks) >= _MASKS_LIMIT:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _note(self, depths: dict[int, int], bits: int, depth: int) -> None:
        while bits:
            bit = bits & -bits
            depths[self._owners[bit]] = depth
            bits ^= bit

    def _shrink(self) -> None:
        """Keep to the budget: first what nobody holds, then the oldest branches."""
        self._peak = max(self._peak, len(self._holders))
        if len(self._holders) <= self._limit:
            return
        while self._dead:
            self.sweep(len(self._holders) + 1)
        swept = len(self._holders)
        while len(self._holders) > self._limit:
            for key in self._branches.oldest():
                self._partial |= self._holders.pop(key)
                self._branches.drop(key)
        self._on_evicted(swept - len(self._holders))

    def _take_slot(self, replica: int) -> _Holding:
        if self._free_slots:
            slot = heapq.heappop(self._free_slots)
        else:
            slot = self._slot_count
            self._slot_count += 1
        bit = 1 << slot
        self._live |= bit
        self._owners[bit] = replica
        return _Holding(slot, bit)

    def _retire(self, held: _Holding) -> None:
        self._live &= ~held.bit
        self._partial &= ~held.bit
        del self._owners[held.bit]
        if held.marked:
            self._dead |= held.bit
        else:
            heapq.heappush(self._free_slots, held.slot)

    def _start_sweep(self) -> bool:
        self._sweeping = self._dead
        self._sweep_keys = list(self._holders) if self._dead else []
        if self._dead and not self._sweep_keys:
            self._end_sweep()
        return bool(self._sweep_keys)

    def _end_sweep(self) -> None:
        for slot in _bits(self._sweeping):
            heapq.heappush(self._free_slots, slot)
        self._dead &= ~self._sweeping
        self._sweeping = 0
        self._sweep_keys = []
        if len(self._holders) * 4 < self._peak and self._peak > _COMPACT_ABOVE:
            self._holders = dict(self._holders.items())
            self._branches.compact()
            self._masks = {}
            self._peak = len(self._holders)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit.bit_length() - 1
        mask ^= bit
