"""The prefix cache: which full blocks hold which prefix, who uses them, which go next.

A node per full block, keyed by the chained key that the router computes too. A
hit compares the parent and the ids, so a 64-bit collision costs a miss and never
a wrong block; roots are namespaces, compared byte by byte, so these never share.
Eviction is leaf first, least recently used first. Every store and removal is a
change of the feed. Knows no clock, no tensor and no request; the same calls give
the same cache on every rank of a replica.
"""

from collections.abc import Iterator

from worker.kvcache.blocks import BlockPool
from worker.kvcache.changes import ChangeLog
from worker.kvcache.keyed import KeyedIds
from worker.kvcache.node import EvictionOrder, Node
from worker.request import CacheChange, CacheDigest


class Chain:
    """The blocks of one running request: found or stored ones first, then its own.

    Attributes:
        path: Cached blocks that it uses, from the first on.
        table: All its blocks; `table[i]` holds positions `i * block_tokens` and following.
            Never changed in place but replaced, so a plan may keep it without a copy.
        private: Whether its further blocks stay its own: one of them could not be stored.
    """

    __slots__ = ("path", "private", "root", "table")

    def __init__(self, root: Node, path: list[Node]) -> None:
        self.root = root
        self.path = path
        self.table = [node.block for node in path]
        self.private = False

    def __repr__(self) -> str:
        return f"<Chain {len(self.path)} cached of {len(self.table)} blocks>"

    @property
    def tip(self) -> Node:
        """The deepest cached node of it."""
        return self.path[-1] if self.path else self.root

    def stores_next(self, keyed: KeyedIds) -> int:
        """Return the key that it stores once the block is computed; 0 when there is none."""
        index = len(self.path)
        if self.private or index >= len(keyed.keys) or not self.tip.cached:
            return 0
        return keyed.keys[index]


class PrefixCache:
    """All blocks of a rank: free, cached, or owned by a chain; always exactly one of these."""

    def __init__(self, *, block_count: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._pool = BlockPool(block_count)
        self._nodes: dict[int, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self._order = EvictionOrder()
        self._changes = ChangeLog()
        self._idle = 0
        self._tick = 0
        self._xor = 0

    def __repr__(self) -> str:
        return (
            f"<PrefixCache {self.total} blocks: {self._pool.free} free, {len(self._nodes)} cached "
            f"({self._idle} idle)>"
        )

    @property
    def total(self) -> int:
        """All blocks."""
        return self._pool.total

    @property
    def available(self) -> int:
        """Blocks that are free or can be evicted at once."""
        return self._pool.free + self._idle

    @property
    def digest(self) -> CacheDigest:
        """How many blocks can be found, and the xor of their keys."""
        return CacheDigest(block_count=len(self._nodes), xor_keys=self._xor)

    def take_changes(self) -> list[CacheChange]:
        """Return what changed since the last call, in order."""
        return self._changes.take()

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold so many ids."""
        return -(-tokens // self.block_tokens)

    def matched_blocks(self, keyed: KeyedIds, max_blocks: int) -> int:
        """How many leading blocks are cached now. Changes nothing."""
        root = self._roots.get(keyed.namespace)
        return 0 if root is None else sum(1 for _ in self._walk(root, keyed, max_blocks))

    def probed_blocks(self, keyed: KeyedIds, max_blocks: int) -> int:
        """How many leading blocks are cached, judged by their keys alone. Changes nothing.

        Takes a few look-ups whatever the length: a block's ancestors are cached with it.
        A collision of keys makes it wrong, so it serves to order and to wait, never to reuse.
        """
        keys, nodes = keyed.keys, self._nodes
        low, high = 0, min(max_blocks, len(keys))
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in nodes:
                low = middle + 1
            else:
                high = middle
        return low

    def open(self, keyed: KeyedIds, max_blocks: int) -> Chain:
        """Begin a chain with the longest cached prefix of at most `max_blocks` blocks.

        Its blocks stay until `close`.
        """
        root = self._roots.get(keyed.namespace)
        if root is None:
            root = Node(None, 0, keyed.ids[:0], -1, namespace=keyed.namespace)
            self._roots[keyed.namespace] = root
        chain = Chain(root, list(self._walk(root, keyed, max_blocks)))
        self._tick += 1
        root.refs += 1
        for node in chain.path:
            node.tick = self._tick
            self._acquire(node)
        return chain

    def grow(self, chain: Chain, block_count: int) -> bool:
        """Give the chain `block_count` blocks in total, evicting where needed.

        Returns:
            False, with nothing changed, when there are not enough blocks.
        """
        missing = block_count - len(chain.table)
        if missing <= 0:
            return True
        if missing > self.available:
            return False
        while self._pool.free < missing:
            self._evict_one()
        chain.table = chain.table + self._pool.take(missing)
        return True

    def store(self, chain: Chain, keyed: KeyedIds, computed_tokens: int) -> None:
        """Put the chain's full blocks into the cache; the KV of `computed_tokens` ids is there.

        A block that another chain has stored meanwhile is used instead of the own one.
        """
        full = computed_tokens // self.block_tokens
        if len(chain.path) >= full or chain.private:
            return
        table = list(chain.table)
        while len(chain.path) < full and not chain.private:
            self._store_next(chain, keyed, table)
        if table != chain.table:
            chain.table = table

    def close(self, chain: Chain) -> None:
        """End a chain: cached blocks stay for others, its own ones are free again."""
        self._tick += 1
        self._pool.give(chain.table[len(chain.path) :])
        for node in reversed(chain.path):
            node.tick = self._tick
            self._release(node)
        chain.root.refs -= 1
        self._drop_empty_root(chain.root)
        chain.path = []
        chain.table = []
        chain.private = True

    def clear(self) -> int:
        """Make everything unfindable; blocks in use stay until their chains close.

        Returns:
            How many blocks left the cache.
        """
        count = len(self._nodes)
        for node in self._nodes.values():
            node.cached = False
            if node.refs == 0:
                self._pool.give([node.block])
        self._nodes.clear()
        self._order.clear()
        self._idle = 0
        self._xor = 0
        self._roots = {name: root for name, root in self._roots.items() if root.refs}
        for root in self._roots.values():
            root.children = 0
        self._changes.cleared()
        return count

    def _walk(self, root: Node, keyed: KeyedIds, max_blocks: int) -> Iterator[Node]:
        parent = root
        for index, key in enumerate(keyed.keys[:max_blocks]):
            node = self._nodes.get(key)
            if node is None or not self._same(node, parent, keyed, index):
                return
            yield node
            parent = node

    @staticmethod
    def _same(node: Node, parent: Node, keyed: KeyedIds, index: int) -> bool:
        # Parents are compared as objects: by induction the whole prefix and namespace agree.
        return node.parent is parent and node.ids == keyed.block(index)

    def _store_next(self, chain: Chain, keyed: KeyedIds, table: list[int]) -> None:
        index = len(chain.path)
        key = keyed.keys[index]
        parent = chain.tip
        known = self._nodes.get(key)
        # Below a cleared block nothing can be found; key 0 means "no parent" in the feed.
        if not parent.cached or key == 0:
            chain.private = True
        elif known is None:
            chain.path.append(self._insert(parent, key, keyed, index, table[index]))
        elif self._same(known, parent, keyed, index):
            self._pool.give([table[index]])
            table[index] = known.block
            self._acquire(known)
            chain.path.append(known)
        else:
            chain.private = True

    def _insert(self, parent: Node, key: int, keyed: KeyedIds, index: int, block: int) -> Node:
        node = Node(parent, key, keyed.block(index), block, namespace=keyed.namespace)
        node.refs = 1
        node.tick = self._tick
        parent.children += 1
        self._nodes[key] = node
        self._xor ^= key
        self._changes.stored(parent.key, key)
        return node

    def _acquire(self, node: Node) -> None:
        if node.refs == 0:
            self._idle -= 1
        node.refs += 1

    def _release(self, node: Node) -> None:
        node.refs -= 1
        if node.refs:
            return
        if not node.cached:
            self._pool.give([node.block])
            return
        self._idle += 1
        if node.evictable:
            self._order.offer(node, len(self._nodes))

    def _evict_one(self) -> None:
        node = self._order.pop()
        assert node is not None, "idle blocks without a leaf"
        assert node.parent is not None, "a root has no block"
        node.cached = False
        del self._nodes[node.key]
        self._idle -= 1
        self._xor ^= node.key
        self._pool.give([node.block])
        self._changes.removed(node.key)
        parent = node.parent
        parent.children -= 1
        if parent.is_root:
            self._drop_empty_root(parent)
        elif parent.evictable:
            self._order.offer(parent, len(self._nodes))

    def _drop_empty_root(self, root: Node) -> None:
        if root.refs == 0 and root.children == 0:
            self._roots.pop(root.namespace, None)
