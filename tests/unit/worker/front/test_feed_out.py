"""The feed: a router that follows the rules holds exactly what the replica's cache holds."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.feed_follower import FeedFollower
from worker.front.feed_out import Chunk, Cursor, Event, FeedBroken, Mirror
from worker.request import CacheChange, CacheDigest


@dataclass
class Cache:
    """What a rank's cache does, kept as naively as can be: key -> parent."""

    rng: random.Random
    held: dict[int, int] = field(default_factory=dict)
    used: int = 0

    def store(self) -> CacheChange:
        parent = self.rng.choice([0, *self.held])
        keys = []
        above = parent
        for _ in range(self.rng.randint(1, 4)):
            self.used += 1
            key = self.used * 0x9E3779B97F4A7C15 % 2**64
            self.held[key] = above
            above = key
            keys.append(key)
        return CacheChange(parent=parent, stored=keys)

    def evict(self) -> CacheChange | None:
        removed: list[int] = []
        for _ in range(self.rng.randint(1, 4)):
            leaves = [key for key in self.held if key not in self.held.values()]
            if not leaves:
                break
            key = self.rng.choice(leaves)
            del self.held[key]
            removed.append(key)
        return CacheChange(removed=removed) if removed else None

    def clear(self) -> CacheChange:
        self.held.clear()
        return CacheChange(cleared=True)

    def digest(self) -> CacheDigest:
        xor = 0
        for key in self.held:
            xor ^= key
        return CacheDigest(len(self.held), xor)


class Wire:
    """A first-in first-out lane that can lose all that waits in it."""

    def __init__(self, mirror: Mirror) -> None:
        # Small enough that small cases meet every bound.
        self.cursor = Cursor(mirror, chunk_keys=3, max_held_keys=12)
        self.router = FeedFollower()
        self.queue: list[Chunk | Event] = []

    def offer(self, event: Event) -> None:
        if self.cursor.offer(event):
            self.queue.append(event)

    def pump(self, parts: int) -> None:
        for _ in range(parts):
            part = self.cursor.take()
            if part is None:
                return
            self.queue += part if isinstance(part, list) else [part]

    def read(self, count: int) -> None:
        for part in self.queue[:count]:
            self.router.take(part)
        del self.queue[:count]

    def drop(self) -> None:
        self.queue.clear()
        self.cursor.begin()
        self.router.whole = False

    def settle(self) -> None:
        self.pump(10_000)
        self.read(len(self.queue))


class World:
    """A replica and two routers that follow it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.incarnation = 0
        self.restart()

    def restart(self) -> None:
        self.incarnation += 1
        self.cache = Cache(random.Random(self.seed))
        self.mirror = Mirror(self.incarnation)
        self.wires = [Wire(self.mirror), Wire(self.mirror)]

    def change(self, change: CacheChange | None) -> None:
        if change is not None:
            event = self.mirror.apply(change)
            for wire in self.wires:
                wire.offer(event)

    def act(self, action: str, which: int) -> None:
        wire = self.wires[which]
        actions: dict[str, Callable[[], None]] = {
            "store": lambda: self.change(self.cache.store()),
            "evict": lambda: self.change(self.cache.evict()),
            "clear": lambda: self.change(self.cache.clear()),
            "pump": lambda: wire.pump(1),
            "read": lambda: wire.read(2),
            "resnapshot": wire.cursor.begin,
            "drop": wire.drop,
            "restart": self.restart,
        }
        actions[action]()


ACTIONS = ["store", "store", "evict", "clear", "pump", "read", "resnapshot", "drop", "restart"]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1)), max_size=60),
)
def test_whatever_happens_every_router_ends_with_what_the_cache_holds(
    seed: int, actions: list[tuple[str, int]]
) -> None:
    world = World(seed)
    for action, which in actions:
        world.act(action, which)
        assert world.mirror.agrees(world.cache.digest())
    for wire in world.wires:
        wire.settle()
        assert wire.cursor.live
        assert wire.router.keys == world.cache.held
        assert wire.router.sequence == world.mirror.sequence
    proof = world.mirror.proof
    assert CacheDigest(proof.block_count, proof.xor_keys) == world.cache.digest()


def test_the_first_event_of_an_incarnation_is_number_one() -> None:
    assert Mirror(7).apply(CacheChange(stored=[5])).sequence == 1


def test_an_empty_cache_has_a_snapshot_of_one_empty_chunk() -> None:
    assert list(Mirror(7).snapshot()) == [Chunk(0, first=True, last=True, keys=[], parents=[])]


def test_a_snapshot_shows_the_moment_it_was_made() -> None:
    mirror = Mirror(7)
    mirror.apply(CacheChange(stored=[5, 6]))
    chunks = mirror.snapshot()
    mirror.apply(CacheChange(removed=[6, 5]))
    assert list(chunks) == [Chunk(1, first=True, last=True, keys=[5, 6], parents=[0, 5])]


@pytest.mark.parametrize(
    "change",
    [
        CacheChange(parent=99, stored=[7]),
        CacheChange(parent=0, stored=[5]),
        CacheChange(removed=[99]),
        CacheChange(removed=[5]),
    ],
    ids=["unknown parent", "stored twice", "removed twice", "parent before child"],
)
def test_a_change_that_contradicts_the_mirror_is_refused_and_not_numbered(
    change: CacheChange,
) -> None:
    mirror = Mirror(7)
    mirror.apply(CacheChange(stored=[5, 6]))
    with pytest.raises(FeedBroken):
        mirror.apply(change)
    assert mirror.sequence == 1


def test_a_chunk_fits_a_frame_of_64_kib() -> None:
    mirror = Mirror(2**64 - 1)
    mirror.apply(CacheChange(stored=[2**64 - 1 - number for number in range(10_000)]))
    chunks = list(mirror.snapshot())
    assert [len(chunk.keys) for chunk in chunks] == [3_500, 3_500, 3_000]
    assert [chunk.first for chunk in chunks] == [True, False, False]
    assert [chunk.last for chunk in chunks] == [False, False, True]
    assert max(len(chunk.keys) for chunk in chunks) * 16 + 64 < 65_536
