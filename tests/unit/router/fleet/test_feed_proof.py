"""Whatever a feed loses, doubles, swaps or says wrongly: never EXACT while different.

And equal to the cache once it is repaired; a part of it, marked as such, over a budget.
"""

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixmesh.errors import LinkLost
from radixmesh.worker.v1 import feed_pb2
from router.fleet.changes import Chunk, Digest
from router.fleet.group import Group
from router.fleet.replica import Reported
from router.fleet.wire import from_event
from router.policy.choice import View
from router.tree.meta_tree import BYTES_PER_KEY, BYTES_PER_RUN
from tests.fakes.group_link import INFO, FakeFleet, FakeGroupLink
from tests.fakes.worker_cache import FakeCache

CHUNK_KEYS = 3
BUDGET = 6 * (BYTES_PER_KEY + BYTES_PER_RUN)
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["store"] * 4
            + ["evict"] * 3
            + ["clear", "digest", "digest", "restart", "relink", "drop", "double", "swap", "wait"]
            + ["wrong key", "wrong count", "wrong parent", "wrong digest"]
            + ["deliver"] * 4
        ),
        PATHS,
        st.integers(0, 5),
    ),
    max_size=80,
)
Message = feed_pb2.SnapshotChunk | feed_pb2.CacheEvent | feed_pb2.Digest | feed_pb2.ReplicaStatus


def keys_of(path: tuple[int, ...]) -> list[int]:
    return [
        1 + sum((digit + 1) * 4**index for index, digit in enumerate(path[:end]))
        for end in range(1, len(path) + 1)
    ]


def altered(message: Message, kind: str, number: int) -> Message:
    """A copy of a message that says something wrong; `number` makes each lie another one."""
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[arg-type]
    lie = number * 0x9E3779B97F4A7C15 % 2**64
    match copy:
        case feed_pb2.Digest():
            copy.block_count += kind == "wrong count"
            copy.xor_keys ^= lie
        case feed_pb2.SnapshotChunk():
            alter_chunk(copy, kind, lie)
        case feed_pb2.CacheEvent():
            alter_event(copy, kind, lie)
    return copy


def alter_chunk(chunk: feed_pb2.SnapshotChunk, kind: str, lie: int) -> None:
    if kind == "wrong parent" and chunk.parents:
        chunk.parents[-1] = chunk.keys[0] if lie % 2 else 0
    elif kind == "wrong key" and chunk.keys:
        chunk.keys[-1] ^= lie
    elif kind == "wrong count" and chunk.keys:
        chunk.keys.pop()
        if lie % 2:
            chunk.parents.pop()


def alter_event(event: feed_pb2.CacheEvent, kind: str, lie: int) -> None:
    keys = event.stored.keys if event.HasField("stored") else event.removed.keys
    if event.HasField("cleared") or not keys:
        return
    if kind == "wrong parent" and event.HasField("stored"):
        event.stored.parent_key = lie if lie % 3 else 0
    elif kind == "wrong key":
        keys[lie % len(keys)] ^= lie
    elif kind == "wrong count" and lie % 2:
        keys.append(keys[0])
    elif kind == "wrong count":
        keys.pop()


@dataclass
class Worker:
    """The truth, and what of it is on its way."""

    cache: FakeCache
    wire: deque[Message]
    history: dict[tuple[int, int], set[int]]

    def send(self, message: Message | None) -> None:
        if message is not None:
            self.wire.append(message)
        self.history[self.cache.incarnation, self.cache.sequence] = set(self.cache.keys)

    def begin(self) -> None:
        """A new incarnation, or a new link: state, then snapshot."""
        self.send(feed_pb2.ReplicaStatus(incarnation=self.cache.incarnation, state=1))  # type: ignore[arg-type]
        self.snapshot()

    def snapshot(self) -> None:
        for chunk in self.cache.snapshot(CHUNK_KEYS):
            self.send(chunk)


class Story:
    """One worker, one router, and a wire between them that fails."""

    def __init__(self) -> None:
        fake = FakeFleet("a")
        self.clock, self.tree = fake.clock, fake.tree
        self.link: FakeGroupLink = fake.links["a"]
        self.group: Group = fake.fleet.groups.get("a")
        self.worker = Worker(FakeCache(0, 1), deque(), {})
        self.answered = 0
        self.lies = 0
        self.attach()

    def attach(self) -> None:
        self.group.on_up(is_new=False)
        self.group.on_info(INFO)
        self.worker.begin()

    def do(self, kind: str, path: tuple[int, ...], pick: int) -> None:
        if kind in ("store", "evict", "clear", "digest"):
            self.work(kind, path, pick)
        elif kind in ("restart", "relink"):
            self.restart(kind)
        elif kind == "wait":
            self.clock.advance(4.0 * pick)
            self.group.tick(self.clock())
        else:
            self.carry(kind, pick)
        self.answer()

    def work(self, kind: str, path: tuple[int, ...], pick: int) -> None:
        """Something happens in the cache, or it is proven."""
        cache = self.worker.cache
        match kind:
            case "store":
                self.worker.send(cache.store(keys_of(path)))
            case "evict":
                for leaf in cache.leaves()[pick : pick + 1]:
                    self.worker.send(cache.remove([leaf]))
            case "clear":
                self.worker.send(cache.clear())
            case "digest":
                self.worker.send(cache.digest())

    def carry(self, kind: str, pick: int) -> None:
        """The wire does its work, or fails to."""
        wire = self.worker.wire
        if kind == "deliver":
            for _ in range(min(pick + 1, len(wire))):
                self.deliver(wire.popleft())
        elif wire:
            self.tamper(kind, pick % len(wire))

    def restart(self, kind: str) -> None:
        if kind == "restart":
            self.worker.cache = FakeCache(0, self.worker.cache.incarnation + 1)
            self.worker.begin()
        else:
            self.worker.wire.clear()
            self.group.on_down(LinkLost("cut"))
            self.attach()

    def tamper(self, kind: str, index: int) -> None:
        """Feeds fail in any way; a status arrives once, and overtakes them, never the reverse."""
        wire = self.worker.wire
        if isinstance(wire[index], feed_pb2.ReplicaStatus):
            return
        if kind.startswith("wrong"):
            self.lies += 1
            wire[index] = altered(wire[index], kind, self.lies)
        elif kind == "drop":
            del wire[index]
        elif kind == "double":
            wire.insert(index, wire[index])
        elif index + 1 < len(wire):
            wire[index], wire[index + 1] = wire[index + 1], wire[index]

    def deliver(self, message: Message) -> None:
        match message:
            case feed_pb2.ReplicaStatus():
                self.group.on_status(0, message.incarnation, Reported.UP)
            case feed_pb2.SnapshotChunk():
                chunk = Chunk(
                    message.as_of_sequence,
                    message.keys,
                    message.parents,
                    message.first,
                    message.last,
                )
                self.group.on_chunk(0, message.incarnation, chunk)
            case feed_pb2.CacheEvent():
                change = from_event(message)
                if change is not None:
                    self.group.on_change(0, message.incarnation, message.sequence, change)
            case feed_pb2.Digest():
                digest = Digest(message.sequence, message.block_count, message.xor_keys)
                self.group.on_digest(0, message.incarnation, digest)
                self.check(message)

    def check(self, digest: feed_pb2.Digest) -> None:
        """At a digest of its incarnation and change: EXACT means equal."""
        replica = self.group.replicas.get(0)
        if replica is None or replica.incarnation != digest.incarnation:
            return
        feed = replica.feed
        if feed.view is View.EXACT and feed._last == digest.sequence:
            truth = self.worker.history.get((digest.incarnation, digest.sequence))
            indexed = self.tree.keys_of(feed.number)
            if truth is not None and self.tree.is_partial(feed.number):
                assert indexed <= truth
            else:
                assert indexed == truth

    def answer(self) -> None:
        """The worker answers each wish for a snapshot."""
        for _ in self.link.resnapshots[self.answered :]:
            self.worker.snapshot()
        self.answered = len(self.link.resnapshots)

    def heal(self) -> None:
        """The wire works again for some minutes."""
        for _ in range(200):
            self.clock.advance(1.0)
            self.worker.send(self.worker.cache.digest())
            while self.worker.wire:
                self.deliver(self.worker.wire.popleft())
                self.answer()
            self.group.tick(self.clock())
            self.answer()


@given(STEPS)
@settings(max_examples=200, deadline=None)
@pytest.mark.timeout(90)
def test_once_repaired_the_index_equals_the_cache(
    steps: list[tuple[str, tuple[int, ...], int]],
) -> None:
    story = Story()
    for step in steps:
        story.do(*step)
    story.heal()
    replica = story.group.replicas[0]
    assert replica.feed.view is View.EXACT
    assert replica.incarnation == story.worker.cache.incarnation
    assert story.tree.keys_of(replica.feed.number) == set(story.worker.cache.keys)
    story.tree.sweep(100_000)
    story.tree.sweep(100_000)
    assert len(story.tree) == len(story.worker.cache.keys)


@given(STEPS)
@settings(max_examples=100, deadline=None)
@pytest.mark.timeout(60)
def test_over_its_budget_a_view_is_a_part_of_the_cache_and_says_so(
    steps: list[tuple[str, tuple[int, ...], int]],
) -> None:
    story = Story()
    story.tree._budget = BUDGET
    for step in steps:
        story.do(*step)
        assert story.tree.cost_bytes <= BUDGET
    story.heal()
    feed, truth = story.group.replicas[0].feed, story.worker.cache.keys
    indexed = story.tree.keys_of(feed.number)
    assert feed.view is View.EXACT
    assert indexed <= set(truth)
    assert {truth[key] for key in indexed} <= indexed | {0}
    assert story.tree.is_partial(feed.number) or indexed == set(truth)
