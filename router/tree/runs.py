"""Runs: consecutive keys of one prefix that the same replicas hold, kept as one.

A forest whose nodes are runs, each named by a number. One map leads from a key to the
number of its run; all that is known of a run stands in columns at that number, so the
index is a few large objects that the garbage collector has nothing to look for in. Knows
keys and masks, which it only compares; knows no replicas, no feeds and no budget.

Below a run hang runs, each below its last key: a key with two children ends its run. Where
holders begin to differ a run is split; where they agree again and nothing else hangs there,
`settle` makes one run of two. Both look at the keys of the shorter part only.
"""

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from struct import Struct

KEY_BYTES = 8
NONE = 0  # the number of no run, and the key above the first block of a prompt
HITS_LIMIT = 15
_SPARSE = 4  # columns are shortened when so many numbers are there for each run
_SMALL = 64
# A map that only grows takes 30 to 60 bytes a key, one from which keys go as others come up to
# 120. One that takes more was made for more keys. To copy it costs five times what it costs
# the map itself to grow, so that is left to when most of them have gone.
_MAP_BYTES_PER_KEY = 250

_pack_one = Struct("=Q").pack


def pack(keys: Iterable[int]) -> bytes:
    """Return keys as bytes, in the machine's order.

    Raises:
        OverflowError, TypeError: One is no number of 64 bits.
    """
    return array("Q", keys).tobytes()


def unpack(packed: bytes) -> "array[int]":
    """Return packed keys as numbers."""
    return array("Q", packed)


class Runs:
    """The forest.

    Attributes:
        of: Key -> number of its run; `of.get(key, NONE)` is safe for any key, key 0 included.
        masks: Who holds a run. 0 where nobody does but something hangs below it.
        keys: The keys of a run, packed, parents first. Empty at numbers that name no run.
        parents: The key above a run, 0 for none.
        children: How many runs hang below a run.
        used: When it was last of use, in ticks.
        hits: How often it was asked for, up to `HITS_LIMIT`.
        count: How many runs there are.
        ticks: Grows with each use.
        watched: Runs whose mask has one of these bits are noted in `found` where they get a
            number. A walk over the numbers, from the highest down, looks there for what
            was put behind its back.
    """

    def __init__(self) -> None:
        self.of: dict[int, int] = {0: NONE}
        self.masks: list[int] = [0]
        self.keys: list[bytes] = [b""]
        self.parents = array("Q", [0])
        self.children = array("I", [0])
        self.used = array("Q", [0])
        self.hits = array("B", [0])
        self.count = 0
        self.ticks = 0
        self.watched = 0
        self.found: list[int] = []
        # The xor of the numbers of a run's children: the number itself where there is one.
        self._heirs = array("I", [0])
        # Free numbers are a list linked through the columns: next in `children`, last in `_heirs`.
        self._free = NONE

    def __len__(self) -> int:
        """Keys."""
        return len(self.of) - 1

    def __repr__(self) -> str:
        return f"<Runs: {len(self)} keys in {self.count}, {len(self.masks)} numbers>"

    def grow(self, parent: int, keys: Sequence[int], packed: bytes, mask: int) -> bool:
        """Add keys that are all new below a key that is there, or below 0.

        Args:
            parent: The key above them.
            keys: Each the parent of the next.
            packed: The same.
            mask: Who holds them.

        Returns:
            False, with nothing added, when one of them comes twice.
        """
        above = self._end_run_at(parent)
        extends = above and self.masks[above] == mask and not self.children[above]
        number = above if extends else self._take()
        before = len(self.of)
        self.of.update(dict.fromkeys(keys, number))
        if len(self.of) - before != len(keys):
            for key in set(keys):
                del self.of[key]
            if not extends:
                self._give(number)
            self.settle(above)
            return False
        self.ticks += 1
        self.used[number] = self.ticks
        if extends:
            self.keys[number] += packed
            return True
        self._set(number, packed, parent, mask)
        self.children[above] += 1
        self._heirs[above] ^= number
        return True

    def follow(self, number: int, keys: bytes) -> tuple[int, int]:
        """Cut out of a run what `keys` have in common with it, from their first key on.

        Returns:
            The number of the run that is just that, and how many keys it has.
        """
        start = self._index(number, keys[:KEY_BYTES])
        if start:
            number = self._split(number, start)[1]
        mine = self.keys[number]
        same = common(len(mine), len(keys), lambda end: keys.startswith(mine[:end]))
        if same < len(mine):
            number = self._split(number, same // KEY_BYTES)[0]
        return number, same // KEY_BYTES

    def follow_up(self, number: int, keys: bytes) -> tuple[int, int]:
        """Cut out of a run what ends like `keys`, whose last key is in it.

        Returns:
            The number of the run that is just that, and how many keys it has.
        """
        end = self._index(number, keys[-KEY_BYTES:]) + 1
        if end * KEY_BYTES < len(self.keys[number]):
            number = self._split(number, end)[0]
        mine = self.keys[number]
        same = common(len(mine), len(keys), lambda size: keys.endswith(mine[len(mine) - size :]))
        if same < len(mine):
            number = self._split(number, (len(mine) - same) // KEY_BYTES)[1]
        return number, same // KEY_BYTES

    def pop(self, number: int, keys: bytes) -> int:
        """Drop from a run below which nothing hangs what ends like `keys`; return how many."""
        mine = self.keys[number]
        if not mine.endswith(keys[-KEY_BYTES:]):
            return 0
        same = common(len(mine), len(keys), lambda size: keys.endswith(mine[len(mine) - size :]))
        if same == len(mine):
            self.drop(number)
        else:
            self.trim(number, same // KEY_BYTES)
        return same // KEY_BYTES

    def trim(self, number: int, count: int) -> None:
        """Drop the last `count` keys of a run below which nothing hangs; it has more than those."""
        mine = self.keys[number]
        cut = len(mine) - count * KEY_BYTES
        self.keys[number] = mine[:cut]
        of = self.of
        for key in unpack(mine[cut:]):
            del of[key]
        self._shrink_map()

    def drop(self, number: int) -> None:
        """Drop a run below which nothing hangs, and those above it that nobody holds any more."""
        of = self.of
        while number:
            for key in unpack(self.keys[number]):
                del of[key]
            above = of[self.parents[number]]
            self.children[above] -= 1
            self._heirs[above] ^= number
            self._inherit(above, number)
            self._give(number)
            number = above if above and not self.children[above] | self.masks[above] else NONE
        self.settle(above)
        self._tidy()

    def settle(self, number: int) -> None:
        """Make one run of a run and the only one below it, and of it and the one above."""
        if not number:
            return
        mask = self.masks[number]
        if self.children[number] == 1:
            below = self._heirs[number]
            if self.masks[below] == mask:
                number = self._fuse(number, below)
        above = self.of[self.parents[number]]
        if above and self.children[above] == 1 and self.masks[above] == mask:
            self._fuse(above, number)

    def touch(self, key: int) -> None:
        """The prefix that ends with a key was asked for."""
        number = self.of.get(key, NONE)
        if number:
            self.ticks += 1
            self.used[number] = self.ticks
            if self.hits[number] < HITS_LIMIT:
                self.hits[number] += 1

    def _end_run_at(self, key: int) -> int:
        """Return the run of a key, which ends there: what comes behind is cut off."""
        number = self.of[key]
        if not number:
            return NONE
        packed = _pack_one(key)
        if self.keys[number].endswith(packed):
            return number
        return self._split(number, self._index(number, packed) + 1)[0]

    def _index(self, number: int, packed: bytes) -> int:
        """Return where a key is in its run."""
        keys = self.keys[number]
        at = keys.find(packed)
        while at % KEY_BYTES:
            at = keys.find(packed, at + 1)
        return at // KEY_BYTES

    def _split(self, number: int, at: int) -> tuple[int, int]:
        """Make two runs of one. The part with fewer keys gets a new number.

        Returns:
            The numbers of both, upper one first.
        """
        keys = self.keys[number]
        upper, lower = keys[: at * KEY_BYTES], keys[at * KEY_BYTES :]
        new = self._take()
        self.used[new], self.hits[new] = self.used[number], self.hits[number]
        if len(upper) < len(lower):
            self._set(new, upper, self.parents[number], self.masks[number])
            self._heirs[self.of[self.parents[number]]] ^= number ^ new
            self.keys[number], self.parents[number] = lower, _last(upper)
            top, bottom = new, number
        else:
            self._set(new, lower, _last(upper), self.masks[number])
            self.children[new], self._heirs[new] = self.children[number], self._heirs[number]
            self.keys[number] = upper
            top, bottom = number, new
        self.children[top], self._heirs[top] = 1, bottom
        self._point(new)
        return top, bottom

    def _fuse(self, upper: int, lower: int) -> int:
        """Make one run of two, of which the lower is all that hangs below the upper."""
        keys = self.keys[upper] + self.keys[lower]
        if len(self.keys[upper]) < len(self.keys[lower]):
            kept, gone = lower, upper
            self.parents[lower] = self.parents[upper]
            self._heirs[self.of[self.parents[upper]]] ^= upper ^ lower
        else:
            kept, gone = upper, lower
            self.children[upper], self._heirs[upper] = self.children[lower], self._heirs[lower]
        # The number as the map has it: keys that share it share one object.
        self._point(gone, self.of[_last(self.keys[kept])])
        self.keys[kept] = keys
        self.used[kept] = max(self.used[upper], self.used[lower])
        self.hits[kept] = max(self.hits[upper], self.hits[lower])
        self._give(gone)
        return kept

    def _inherit(self, above: int, number: int) -> None:
        """Who asked for a run asked for what is above it."""
        if above:
            self.used[above] = max(self.used[above], self.used[number])
            self.hits[above] = min(self.hits[above] + self.hits[number], HITS_LIMIT)

    def _point(self, number: int, to: int = NONE) -> None:
        self.of.update(dict.fromkeys(unpack(self.keys[number]), to or number))

    def _set(self, number: int, keys: bytes, parent: int, mask: int) -> None:
        self.keys[number] = keys
        self.parents[number] = parent
        self.masks[number] = mask
        if mask & self.watched:
            self.found.append(number)

    def _take(self) -> int:
        """Return a free number, as of a new run without children."""
        self.count += 1
        number = self._free
        if number:
            self._unlink(number)
            self.children[number] = self._heirs[number] = self.hits[number] = 0
            return number
        self.masks.append(0)
        self.keys.append(b"")
        for column in (self.parents, self.children, self._heirs, self.used, self.hits):
            column.append(0)
        return len(self.masks) - 1

    def _give(self, number: int) -> None:
        self.count -= 1
        self.masks[number], self.keys[number] = 0, b""
        self.children[number], self._heirs[number] = self._free, NONE
        if self._free:
            self._heirs[self._free] = number
        self._free = number

    def _unlink(self, number: int) -> None:
        after, before = self.children[number], self._heirs[number]
        if before:
            self.children[before] = after
        else:
            self._free = after
        if after:
            self._heirs[after] = before

    def _tidy(self) -> None:
        """Give back memory, a little each time a run goes."""
        for _ in range(_SPARSE):
            if len(self.masks) <= _SPARSE * self.count + _SMALL:
                break
            self._shorten()
        if sys.getsizeof(self.parents) > _SPARSE * KEY_BYTES * (len(self.parents) + _SMALL):
            self._fit_columns()
        self._shrink_map()

    def _fit_columns(self) -> None:
        """Copy the columns: an array that gets shorter keeps its memory."""
        self.parents, self.used = self.parents[:], self.used[:]
        self.children, self._heirs = self.children[:], self._heirs[:]
        self.hits = self.hits[:]

    def _shrink_map(self) -> None:
        if sys.getsizeof(self.of) > _MAP_BYTES_PER_KEY * (len(self.of) + _SMALL):
            self.of = dict(self.of)

    def _shorten(self) -> None:
        """Take the highest number off the columns; its run, if there is one, gets another."""
        last = len(self.masks) - 1
        if self.keys[last]:
            self._move(last)
        else:
            self._unlink(last)
        self.masks.pop()
        self.keys.pop()
        for column in (self.parents, self.children, self._heirs, self.used, self.hits):
            column.pop()

    def _move(self, number: int) -> None:
        to = self._take()
        self.count -= 1
        self._set(to, self.keys[number], self.parents[number], self.masks[number])
        for column in (self.children, self._heirs, self.used, self.hits):
            column[to] = column[number]
        self._heirs[self.of[self.parents[to]]] ^= number ^ to
        self._point(to)


def _last(keys: bytes) -> int:
    return int.from_bytes(keys[-KEY_BYTES:], sys.byteorder)


def common(mine: int, theirs: int, same: Callable[[int], bool]) -> int:
    """Return how many bytes two runs of keys have in common, in whole keys.

    Args:
        mine: Bytes of one.
        theirs: Bytes of the other.
        same: Whether they agree in so many bytes. The first key does.
    """
    end = min(mine, theirs)
    if same(end):
        return end
    low, high = 1, end // KEY_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if same(middle * KEY_BYTES):
            low = middle
        else:
            high = middle
    return low * KEY_BYTES
