"""Nodes of the prefix cache and the order in which they are evicted. Knows no keys' meaning."""

import heapq
from array import array

# Rebuild the heap when it holds so many times more entries than there are nodes.
_SLACK = 4


class Node:
    """One full block in the cache, or the root of a namespace (`parent` is None).

    Attributes:
        key: Its chained key; 0 for a root.
        ids: The ids of this block; compared on every hit.
        block: Where its KV is; -1 for a root.
        refs: Requests that use it; they count on all its ancestors too.
        children: Nodes below it.
        cached: Whether it can be found. A cleared node in use is not, until it is freed.
        tick: When it was used last, in turns of the cache.
    """

    __slots__ = ("block", "cached", "children", "ids", "key", "namespace", "parent", "refs", "tick")

    def __init__(
        self, parent: "Node | None", key: int, ids: "array[int]", block: int, *, namespace: bytes
    ) -> None:
        self.parent = parent
        self.key = key
        self.ids = ids
        self.block = block
        self.namespace = namespace
        self.refs = 0
        self.children = 0
        self.cached = True
        self.tick = 0

    def __repr__(self) -> str:
        return f"<Node {self.key:016x} block={self.block} refs={self.refs} tick={self.tick}>"

    @property
    def is_root(self) -> bool:
        """Whether it stands for a namespace and holds no block."""
        return self.parent is None

    @property
    def evictable(self) -> bool:
        """Whether it may go now: found by nobody's request and with nothing below."""
        return self.cached and self.refs == 0 and self.children == 0 and not self.is_root


class EvictionOrder:
    """Evictable leaves, least recently used first; ties by age of entry, so ranks agree."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []
        self._serial = 0

    def offer(self, node: Node, node_count: int) -> None:
        """Take a node that has become evictable. `node_count` bounds the heap."""
        self._serial += 1
        heapq.heappush(self._heap, (node.tick, self._serial, node))
        if len(self._heap) > _SLACK * node_count + 64:
            self._compact()

    def pop(self) -> Node | None:
        """Return the leaf to evict next, or None when there is none."""
        while self._heap:
            tick, _, node = heapq.heappop(self._heap)
            if node.evictable and node.tick == tick:
                return node
        return None

    def clear(self) -> None:
        """Forget all."""
        self._heap.clear()

    def _compact(self) -> None:
        seen: set[int] = set()
        kept = []
        for entry in sorted(self._heap):
            tick, _, node = entry
            if node.evictable and node.tick == tick and id(node) not in seen:
                seen.add(id(node))
                kept.append(entry)
        self._heap = kept
