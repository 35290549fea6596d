"""A replica's prefix cache as a feed sees it: keys, numbered events, snapshots, digests.

Plays the worker's side of the feed in tests, on the wire's own messages, and can
misbehave on purpose: forget to send, count wrongly, start over.
"""

from collections.abc import Sequence

from radixmesh.worker.v1 import feed_pb2


class FakeCache:
    """One incarnation's cache. `keys` maps each key to its parent, parents first."""

    def __init__(self, dp_rank: int, incarnation: int) -> None:
        self.dp_rank = dp_rank
        self.incarnation = incarnation
        self.sequence = 0
        self.keys: dict[int, int] = {}
        self.digest_error = 0

    def matched(self, keys: Sequence[int]) -> int:
        """How many leading keys it holds."""
        return next((depth for depth, key in enumerate(keys) if key not in self.keys), len(keys))

    def store(self, keys: Sequence[int]) -> feed_pb2.CacheEvent | None:
        """Hold a whole prompt's keys; the event, or None when nothing is new."""
        depth = self.matched(keys)
        if depth == len(keys):
            return None
        parent = keys[depth - 1] if depth else 0
        event = self._event()
        event.stored.parent_key = parent
        event.stored.keys.extend(keys[depth:])
        for key in keys[depth:]:
            self.keys[key] = parent
            parent = key
        return event

    def remove(self, keys: Sequence[int]) -> feed_pb2.CacheEvent:
        """Evict keys, children first."""
        event = self._event()
        event.removed.keys.extend(keys)
        for key in keys:
            del self.keys[key]
        return event

    def leaves(self) -> list[int]:
        """Keys without children."""
        parents = set(self.keys.values())
        return [key for key in self.keys if key not in parents]

    def clear(self) -> feed_pb2.CacheEvent:
        """Empty it."""
        self.keys.clear()
        event = self._event()
        event.cleared.SetInParent()
        return event

    def _event(self) -> feed_pb2.CacheEvent:
        self.sequence += 1
        return feed_pb2.CacheEvent(
            dp_rank=self.dp_rank, incarnation=self.incarnation, sequence=self.sequence
        )

    def snapshot(self, chunk_keys: int = 1000) -> list[feed_pb2.SnapshotChunk]:
        """All keys, in chunks."""
        pairs = list(self.keys.items())
        starts = range(0, max(1, len(pairs)), chunk_keys)
        chunks = []
        for start in starts:
            part = pairs[start : start + chunk_keys]
            chunks.append(
                feed_pb2.SnapshotChunk(
                    dp_rank=self.dp_rank,
                    incarnation=self.incarnation,
                    as_of_sequence=self.sequence,
                    first=start == 0,
                    last=start == starts[-1],
                    keys=[key for key, _ in part],
                    parents=[parent for _, parent in part],
                )
            )
        return chunks

    def digest(self) -> feed_pb2.Digest:
        """The proof of what it holds; wrong by `digest_error` blocks."""
        xor = 0
        for key in self.keys:
            xor ^= key
        return feed_pb2.Digest(
            dp_rank=self.dp_rank,
            incarnation=self.incarnation,
            sequence=self.sequence,
            block_count=len(self.keys) + self.digest_error,
            xor_keys=xor,
        )
