"""The meta-tree: which replica holds which prefix, and which one soon will.

Knows block keys and replica numbers; refuses to know clocks, sockets, load and
how far a view is trusted. A key names a whole prefix, so one map from key to holders
is a prefix tree. A replica that holds a block holds its ancestors, so how deep it
matches is found by binary search.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import reduce
from operator import xor

from router.tree.eviction import Hand
from router.tree.holders import Holders, Holding
from router.tree.marks import Marks, MarkTable
from router.tree.runs import KEY_BYTES, NONE, Runs, pack, unpack
from router.tree.search import leading

# Upper bounds: a key is 48 bytes, 8 in its run, and where keys come and go up to 120 in the map,
# half of that as a rule. A run costs its number, its columns and one object.
BYTES_PER_KEY = 176
BYTES_PER_RUN = 128
DEFAULT_BUDGET_BYTES = 512 * 2**20
_MASKS_LIMIT = 1 << 16
_SWEEP_PER_KEY = 4  # each stored key pays for so many runs of a sweep
_SWEEP_STEP = 1024
_DEAD_LIMIT = 512  # bits that may wait for a sweep; beyond them each pays its part of one
_SLACK_LIMIT = 4096 * BYTES_PER_KEY
_NO_MARKS: Mapping[int, int] = {}


class FeedBroken(Exception):
    """A change contradicts what the replica said before; its view must be dropped."""


class MetaTree:
    """The prefixes of all replicas, in bounded memory.

    Replica numbers come from `join` and are never reused. Inside, a replica owns a
    bit of the masks; when it is cleared its bit leaves the live mask at once, and
    the bit is given to another only after a sweep has taken it out of all masks.

    Args:
        budget_bytes: Over it, what is least worth having goes, tips first.
        on_evicted: Told how many blocks the budget dropped.
    """

    def __init__(
        self,
        *,
        budget_bytes: int = DEFAULT_BUDGET_BYTES,
        on_evicted: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._budget = max(budget_bytes, BYTES_PER_KEY)
        self._on_evicted = on_evicted
        self._runs = Runs()
        self._holders = Holders()
        self._marks = MarkTable()
        self._hand = Hand(self._runs)
        self._masks: dict[int, int] = {}
        self._sweep_at = 0

    def __len__(self) -> int:
        """Keys in the index, those that only a swept-to-be replica holds included."""
        return len(self._runs)

    def __repr__(self) -> str:
        return f"<MetaTree of {len(self)} keys, {len(self._holders)} replicas>"

    @property
    def slot_count(self) -> int:
        """Width of the masks in bits: replicas that live or wait for their sweep, at the most."""
        return self._holders.slot_count

    @property
    def run_count(self) -> int:
        """How many runs the keys are kept in: consecutive ones that have the same holders."""
        return self._runs.count

    @property
    def cost_bytes(self) -> int:
        """What the index costs, by the upper bounds that its budget counts with."""
        return len(self._runs) * BYTES_PER_KEY + self._runs.count * BYTES_PER_RUN

    @property
    def marked_count(self) -> int:
        """Blocks that are booked and not there yet, counted once for each replica."""
        return len(self._marks)

    def join(self) -> int:
        """Return the number of a new replica, which holds nothing."""
        return self._holders.join()

    def leave(self, replica: int) -> None:
        """Forget a replica for good, with its marks. Its number is never used again."""
        self._marks.forget(replica)
        self._holders.leave(replica)
        self._pay()

    def clear(self, replica: int, *, keep_marks: bool = False) -> None:
        """The replica holds nothing any more, from now on; its digest starts anew.

        Args:
            replica: Which.
            keep_marks: What is booked there will still come: only the view was lost.
        """
        held = self._holders.renew(replica)
        if keep_marks:
            self._marks.move(replica, held.bit)
        else:
            self._marks.forget(replica)
        self._pay()

    def mark(self, replica: int, keys: Sequence[int]) -> Marks:
        """A booking will bring a prompt's keys to a replica; what it holds already isn't marked.

        The marks go when the blocks are stored, when the booking releases them, and with
        the replica.
        """
        bit = self._holders[replica].bit
        of, masks = self._runs.of, self._runs.masks
        held = leading(keys, 0, lambda key: bool(masks[of.get(key, NONE)] & bit))
        return self._marks.mark(replica, bit, keys[held:])

    def store(self, replica: int, parent: int, keys: Collection[int]) -> None:
        """The replica now holds `keys`, each the parent of the next, below `parent` (0: none).

        Raises:
            FeedBroken: It doesn't hold the parent, or holds one of the keys already, or one is
                no key. The replica may hold a part of them then, and is to be cleared.
        """
        self._store(replica, parent, keys if isinstance(keys, list) else list(keys))
        self._shrink()

    def store_pairs(self, replica: int, keys: Sequence[int], parents: Sequence[int]) -> None:
        """The replica holds `keys`, each below the parent at the same index, parents first.

        Raises:
            FeedBroken: As for `store`, or the columns differ in length.
        """
        if len(keys) != len(parents):
            raise FeedBroken(f"{len(keys)} keys with {len(parents)} parents")
        start = 0
        for index in range(1, len(keys) + 1):
            if index == len(keys) or parents[index] != keys[index - 1]:
                self._store(replica, parents[start], list(keys[start:index]))
                start = index
        self._shrink()

    def remove(self, replica: int, keys: Collection[int]) -> None:
        """The replica no longer holds `keys`; children come before parents.

        Raises:
            FeedBroken: It does not hold one of them. It may have lost others of them then, and
                is to be cleared.
        """
        held, runs = self._holders[replica], self._runs
        bit, partial = held.bit, self._holders.partial & held.bit
        upwards = unpack(_packed(keys))
        upwards.reverse()
        packed, end = upwards.tobytes(), len(upwards)
        while end:
            number = runs.of.get(upwards[end - 1], NONE)
            if runs.masks[number] & bit:
                start = end * KEY_BYTES - len(runs.keys[number])
                end -= self._take(number, packed[max(start, 0) : end * KEY_BYTES], bit)
            elif partial:
                end -= 1
            else:
                raise FeedBroken("removed a block that is not there")
        held.block_count -= len(upwards)
        held.xor_keys = reduce(xor, keys, held.xor_keys)

    def match(self, keys: Sequence[int]) -> dict[int, int]:
        """Return how many of the leading `keys` each replica holds; none that holds none."""
        depths = self._depths(keys, self._holders.live) if keys else {}
        if depths:
            self._runs.touch(keys[max(depths.values()) - 1])
        return depths

    def reach(self, keys: Sequence[int]) -> tuple[dict[int, int], dict[int, int]]:
        """Return how many of the leading `keys` each replica holds, and how many it soon will.

        Returns:
            `match(keys)`, and with them what is booked there and has not come yet: only those
            replicas where that is more.
        """
        held = self.match(keys)
        marked = self._marks.masks
        depths = {0, *held.values()} if marked else ()
        if not any(keys[depth] in marked for depth in depths if depth < len(keys)):
            return held, {}
        among = self._marks.bits() & self._holders.live
        soon = self._depths(keys, among, marked)
        return held, {each: depth for each, depth in soon.items() if depth > held.get(each, 0)}

    def digest(self, replica: int) -> tuple[int, int]:
        """Return (block count, xor of keys) over all events, dropped keys included."""
        held = self._holders[replica]
        return held.block_count, held.xor_keys

    def holds(self, replica: int, key: int) -> bool:
        """Whether a replica holds the prefix that ends with `key`."""
        mask = self._runs.masks[self._runs.of.get(key, NONE)]
        return bool(mask & self._holders[replica].bit)

    def is_partial(self, replica: int) -> bool:
        """Whether the budget dropped some of the replica's keys."""
        return bool(self._holders.partial & self._holders[replica].bit)

    def keys_of(self, replica: int) -> set[int]:
        """All indexed keys of a replica. Walks all runs; for proofs and tests."""
        bit, runs = self._holders[replica].bit, self._runs
        return {
            key
            for number, mask in enumerate(runs.masks)
            if mask & bit
            for key in unpack(runs.keys[number])
        }

    def sweep(self, limit: int) -> bool:
        """Take retired replicas out of up to `limit` runs; return whether all is done."""
        runs = self._runs
        if not runs.watched and not self._start_sweep():
            return True
        self._sweep_at = min(self._sweep_at, len(runs.masks))
        while limit > 0 and (self._sweep_at > 1 or runs.found):
            limit -= 1
            if runs.found:
                number = runs.found.pop()
            else:
                self._sweep_at -= 1
                number = self._sweep_at
            if number < len(runs.masks) and runs.masks[number] & runs.watched:
                self._assign(number, runs.masks[number] & ~runs.watched)
        if self._sweep_at <= 1 and not runs.found:
            self._end_sweep()
        return not self._holders.dead

    def _depths(
        self, keys: Sequence[int], among: int, marked: Mapping[int, int] = _NO_MARKS
    ) -> dict[int, int]:
        """Return how deep each of some replicas goes, by binary search for all of them at once."""
        number_of, masks = self._runs.of.get, self._runs.masks
        depths: dict[int, int] = {}
        first = (masks[number_of(keys[0], NONE)] | marked.get(keys[0], 0)) & among
        # Spans (low, mask at low, high, mask at high): bits lost between have their depth there.
        spans = [(0, first, len(keys), 0)] if first else []
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            while high - low > 1:
                middle = (low + high) >> 1
                mask = masks[number_of(keys[middle], NONE)]
                if marked:
                    mask |= marked.get(keys[middle], 0)
                mask = mask & low_mask | high_mask
                if mask == high_mask:
                    high = middle
                elif mask == low_mask:
                    low = middle
                else:
                    spans.append((middle, mask, high, high_mask))
                    high, high_mask = middle, mask
            self._holders.note(depths, low_mask ^ high_mask, high)
        return depths

    def _store(self, replica: int, parent: int, keys: list[int]) -> None:
        held, runs = self._holders[replica], self._runs
        packed = _packed(keys)
        if parent and not runs.masks[runs.of.get(parent, NONE)] & held.bit:
            if not self._holders.partial & held.bit:
                raise FeedBroken("stored a block below a parent that is not there")
        elif keys:
            held.marked = True
            if runs.of.keys().isdisjoint(keys):
                self._grow(held, parent, keys, packed)
            else:
                self._overlay(held, parent, keys, packed)
        held.block_count += len(keys)
        held.xor_keys = reduce(xor, keys, held.xor_keys)
        if self._marks.masks:
            self._marks.confirm(replica, keys)
        if self._holders.dead:
            self.sweep(len(keys) * _SWEEP_PER_KEY)

    def _grow(self, held: Holding, parent: int, keys: list[int], packed: bytes) -> None:
        if not self._runs.grow(parent, keys, packed, held.bit):
            raise FeedBroken("stored a block twice at once")

    def _overlay(self, held: Holding, parent: int, keys: list[int], packed: bytes) -> None:
        """Store keys of which others hold some already."""
        runs, start = self._runs, 0
        while start < len(keys):
            number = runs.of.get(keys[start], NONE)
            if not keys[start]:
                raise FeedBroken("a block has no key")
            if not number:
                end = next((i for i in range(start, len(keys)) if keys[i] in runs.of), len(keys))
                part = packed[start * KEY_BYTES : end * KEY_BYTES]
                self._grow(held, parent, keys[start:end], part)
                start = end
            elif runs.masks[number] & held.bit:
                raise FeedBroken("stored a block that is there already")
            else:
                begin = start * KEY_BYTES
                part = packed[begin : begin + len(runs.keys[number])]
                number, count = runs.follow(number, part)
                runs.masks[number] = self._intern(runs.masks[number] | held.bit)
                runs.settle(number)
                start += count
            parent = keys[start - 1]

    def _take(self, number: int, keys: bytes, bit: int) -> int:
        """Take a replica out of what of a run ends like `keys`; return how many keys that is."""
        runs = self._runs
        if runs.masks[number] == bit and not runs.children[number]:
            count = runs.pop(number, keys)
            if count:
                return count
        number, count = runs.follow_up(number, keys)
        self._assign(number, runs.masks[number] & ~bit)
        return count

    def _assign(self, number: int, mask: int) -> None:
        """Set who holds a run; without holders it stays only while something hangs below it."""
        runs = self._runs
        if mask or runs.children[number]:
            runs.masks[number] = self._intern(mask)
            runs.settle(number)
        else:
            runs.drop(number)

    def _intern(self, mask: int) -> int:
        if len(self._masks) >= _MASKS_LIMIT:
            self._masks.clear()
        return self._masks.setdefault(mask, mask)

    def _shrink(self) -> None:
        """Keep to the budget: first what nobody holds, then what is least worth having."""
        if self.cost_bytes <= self._budget:
            return
        while self._holders.dead and self.cost_bytes > self._budget:
            self.sweep(_SWEEP_STEP)
        before = len(self._runs)
        while self.cost_bytes > self._budget - min(self._budget // 64, _SLACK_LIMIT):
            for worth, number, turnover in self._hand.least():
                self._evict(worth, number, turnover)
        self._on_evicted(before - len(self._runs))

    def _evict(self, worth: int, number: int, turnover: int) -> None:
        """Drop as much of a run as the budget asks for, from its tip, if it is still worth that."""
        runs = self._runs
        excess = self.cost_bytes - self._budget + min(self._budget // 64, _SLACK_LIMIT)
        if excess <= 0 or number >= len(runs.masks) or not runs.keys[number]:
            return
        if runs.children[number] or self._hand.worth(number, turnover) > worth:
            return  # its neighbours that went have changed it
        self._holders.partial |= runs.masks[number] & self._holders.live
        count = -(-excess // BYTES_PER_KEY)
        if count * KEY_BYTES < len(runs.keys[number]):
            runs.trim(number, count)
        else:
            runs.drop(number)

    def _pay(self) -> None:
        """A bit was retired: where many were, sweep a little, lest masks grow without end."""
        if self._holders.slot_count > _DEAD_LIMIT:
            self.sweep(len(self._runs.masks) // _DEAD_LIMIT + 1)

    def _start_sweep(self) -> bool:
        self._runs.watched = self._holders.dead
        self._sweep_at = len(self._runs.masks)
        return bool(self._runs.watched)

    def _end_sweep(self) -> None:
        self._holders.bury(self._runs.watched)
        self._runs.watched = 0
        self._masks.clear()


def _packed(keys: Collection[int]) -> bytes:
    try:
        return pack(keys)
    except (OverflowError, TypeError):
        raise FeedBroken("a key is no number of 64 bits") from None
