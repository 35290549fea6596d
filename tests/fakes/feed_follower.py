"""A consumer of one replica's feed, as strict as the contract: any breach fails the test."""

from dataclasses import dataclass, field

from radixmesh.worker.v1 import feed_pb2
from worker.front.feed_out import Chunk, Event, Proof
from worker.request import CacheChange


@dataclass
class FeedFollower:
    """A router's copy of one replica's cache: key -> parent."""

    keys: dict[int, int] = field(default_factory=dict)
    sequence: int | None = None  # None: no chunk has come yet
    whole: bool = False
    incarnation: int = 0
    proofs: int = 0
    snapshots: int = 0

    def take(self, part: Chunk | Event | Proof) -> None:
        """Apply the next part of the feed."""
        if isinstance(part, Chunk):
            self._take_chunk(part)
        elif isinstance(part, Event):
            self._take_event(part)
        else:
            assert self.whole, "a proof came before the snapshot was complete"
            assert part.sequence == self.sequence, "proof of another moment"
            assert part.block_count == len(self.keys)
            assert part.xor_keys == self.xor()
            self.proofs += 1

    def xor(self) -> int:
        """Exclusive or of all keys."""
        value = 0
        for key in self.keys:
            value ^= key
        return value

    def take_chunk_message(self, message: feed_pb2.SnapshotChunk) -> None:
        """Apply a chunk off the wire; a first one may begin a new incarnation."""
        if message.first:
            self.incarnation = message.incarnation
        assert message.incarnation == self.incarnation
        self.take(
            Chunk(
                message.as_of_sequence,
                message.first,
                message.last,
                list(message.keys),
                list(message.parents),
            )
        )

    def take_event_message(self, message: feed_pb2.CacheEvent) -> None:
        """Apply an event off the wire, unless it is over.

        Of another incarnation, or older than the snapshot that came in the same frame: a
        frame joined from several lists snapshots before events.
        """
        if message.incarnation != self.incarnation:
            return
        if self.whole and self.sequence is not None and message.sequence <= self.sequence:
            return
        kind = message.WhichOneof("change")
        changes = {
            "stored": CacheChange(message.stored.parent_key, list(message.stored.keys)),
            "removed": CacheChange(removed=list(message.removed.keys)),
            "cleared": CacheChange(cleared=True),
        }
        assert kind is not None
        self.take(Event(message.sequence, changes[kind]))

    def take_digest_message(self, message: feed_pb2.Digest) -> None:
        """Check a digest off the wire, unless it is over, like events."""
        same = message.incarnation == self.incarnation
        if same and self.sequence is not None and message.sequence >= self.sequence:
            self.take(Proof(message.sequence, message.block_count, message.xor_keys))

    def _take_chunk(self, chunk: Chunk) -> None:
        if chunk.first:
            self.keys.clear()
            self.sequence = chunk.as_of
            self.snapshots += 1
        assert chunk.as_of == self.sequence
        for key, parent in zip(chunk.keys, chunk.parents, strict=True):
            assert parent == 0 or parent in self.keys, "child before parent"
            self.keys[key] = parent
        self.whole = chunk.last

    def _take_event(self, event: Event) -> None:
        assert self.whole, "an event came before the snapshot was complete"
        assert self.sequence is not None
        assert event.sequence == self.sequence + 1, "gap"
        self.sequence = event.sequence
        if event.change.cleared:
            self.keys.clear()
        parent = event.change.parent
        for key in event.change.stored:
            assert parent == 0 or parent in self.keys, "unknown parent"
            self.keys[key] = parent
            parent = key
        for key in event.change.removed:
            assert key not in self.keys.values(), "parent before child"
            del self.keys[key]
