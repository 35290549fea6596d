"""What a replica's prefix cache holds, and what each router has been told of it.

A `Mirror` copies one incarnation's cache from the changes that its rank reports, and
numbers them. A `Cursor` is one router's place in that story: a snapshot as of some
sequence number, then every later event in order, with no gap. Routers thus cost the
ranks nothing. Pure: knows keys and numbers; no wire, no clock, no sockets.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from worker.request import CacheChange, CacheDigest

# A chunk of this many keys and parents, 16 bytes each, fits a 64 KiB frame.
CHUNK_KEYS = 3_500
# Keys that wait behind an unfinished snapshot before the snapshot is begun anew.
MAX_HELD_KEYS = 262_144


class FeedBroken(Exception):
    """A reported change contradicts the mirror: a bug in the rank, or a lost message."""


@dataclass(frozen=True, slots=True)
class Event:
    """One numbered change of a cache."""

    sequence: int
    change: CacheChange

    @property
    def key_count(self) -> int:
        """How many keys it carries; at least 1, so that a bound on keys bounds events."""
        return max(1, len(self.change.stored) + len(self.change.removed))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a snapshot: `parents[i]` is the parent of `keys[i]`, 0 at the root."""

    as_of: int
    first: bool
    last: bool
    keys: list[int]
    parents: list[int]


@dataclass(frozen=True, slots=True)
class Proof:
    """The digest of a cache after event `sequence`."""

    sequence: int
    block_count: int
    xor_keys: int


class Mirror:
    """The keys of one incarnation's cache, parents before children."""

    def __init__(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        # Insertion order has parents before children: a parent is stored before its
        # child, and can't leave and come back while the child stays.
        self._parents: dict[int, int] = {}
        self._child_counts: dict[int, int] = {}
        self._xor = 0

    def __repr__(self) -> str:
        return f"Mirror({len(self._parents)} blocks, sequence {self.sequence})"

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: int) -> bool:
        return key in self._parents

    @property
    def proof(self) -> Proof:
        """The digest of the mirror as it is."""
        return Proof(self.sequence, len(self._parents), self._xor)

    def agrees(self, digest: CacheDigest) -> bool:
        """Whether the rank's own digest equals the mirror's."""
        return digest.block_count == len(self._parents) and digest.xor_keys == self._xor

    def apply(self, change: CacheChange) -> Event:
        """Take a change over and number it.

        Raises:
            FeedBroken: It contradicts the mirror. The mirror may hold a part of it and has
                not numbered it, so only `Cleared` makes it trustworthy again.
        """
        if change.cleared:
            self._parents.clear()
            self._child_counts.clear()
            self._xor = 0
        elif change.stored:
            self._store(change.parent, change.stored)
        else:
            for key in change.removed:
                self._remove(key)
        self.sequence += 1
        return Event(self.sequence, change)

    def snapshot(self, chunk_keys: int = CHUNK_KEYS) -> Iterator[Chunk]:
        """Return chunks of the mirror as it is now; later changes do not show in them."""
        keys, parents = list(self._parents), list(self._parents.values())
        return _chunks(self.sequence, keys, parents, chunk_keys)

    def _store(self, parent: int, keys: list[int]) -> None:
        parents = self._parents
        if parent and parent not in parents:
            raise FeedBroken(f"stored below the unknown parent {parent:016x}")
        for key in keys:
            if key in parents:
                raise FeedBroken(f"stored twice: {key:016x}")
            parents[key] = parent
            self._child_counts[parent] = self._child_counts.get(parent, 0) + 1
            self._xor ^= key
            parent = key

    def _remove(self, key: int) -> None:
        if key not in self._parents:
            raise FeedBroken(f"removed but not stored: {key:016x}")
        if self._child_counts.get(key):
            raise FeedBroken(f"removed before its children: {key:016x}")
        parent = self._parents.pop(key)
        left = self._child_counts[parent] - 1
        if left:
            self._child_counts[parent] = left
        else:
            del self._child_counts[parent]
        self._xor ^= key


def _chunks(as_of: int, keys: list[int], parents: list[int], size: int) -> Iterator[Chunk]:
    for start in range(0, max(len(keys), 1), size):
        end = start + size
        yield Chunk(as_of, start == 0, end >= len(keys), keys[start:end], parents[start:end])


class Cursor:
    """One router's place in the story of one incarnation; begins with a snapshot.

    While the snapshot is under way, events are held here and not sent. Everything must
    leave on one first-in first-out lane, in the order in which it is taken from here;
    then the router sees chunks, then events without a gap.
    """

    def __init__(
        self,
        mirror: Mirror,
        *,
        chunk_keys: int = CHUNK_KEYS,
        max_held_keys: int = MAX_HELD_KEYS,
    ) -> None:
        self.mirror = mirror
        self._chunk_keys = chunk_keys
        self._max_held_keys = max_held_keys
        self._held: deque[Event] = deque()
        self._held_keys = 0
        self._chunks: Iterator[Chunk] | None = None
        self._live = False

    @property
    def live(self) -> bool:
        """Whether the router has been given everything so far."""
        return self._live

    def begin(self) -> None:
        """Start over: the router dropped its view, or its feed was dropped."""
        self._held.clear()
        self._held_keys = 0
        self._chunks = None  # made when first taken, so that it is as fresh as can be
        self._live = False

    def offer(self, event: Event) -> bool:
        """Note a new event. Returns whether it is to be sent now; else it waits here."""
        if self._live:
            return True
        if self._chunks is None:
            return False  # the snapshot to come includes it
        self._held.append(event)
        self._held_keys += event.key_count
        if self._held_keys > self._max_held_keys:
            self.begin()
        return False

    def take(self) -> Chunk | list[Event] | None:
        """Return what goes out next: a chunk, or held events; None when all is given."""
        if self._live:
            return None
        if self._chunks is None:
            self._chunks = self.mirror.snapshot(self._chunk_keys)
        chunk = next(self._chunks, None)
        if chunk is None:
            return self._take_held()
        if chunk.last and not self._held:
            self._live = True
        return chunk

    def _take_held(self) -> list[Event]:
        taken: list[Event] = []
        keys = 0
        while self._held and keys < self._chunk_keys:
            event = self._held.popleft()
            keys += event.key_count
            taken.append(event)
        self._held_keys -= keys
        self._live = not self._held
        return taken
