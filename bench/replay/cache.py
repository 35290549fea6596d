"""A worker's prefix cache: blocks by key, leaf-first LRU, reference counts. Knows no time.

The same rules as `worker/kvcache`, without ids: keys are compared alone, blocks have no place.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence

from router.fleet.changes import Change, Removed, Stored


class _Block:
    __slots__ = ("children", "key", "parent", "refs", "tick")

    def __init__(self, key: int, parent: "_Block | None", tick: int) -> None:
        self.key = key
        self.parent = parent
        self.refs = 1
        self.children = 0
        self.tick = tick


class Chain:
    """The blocks of one running request: cached ones first, then its own."""

    __slots__ = ("keys", "own", "path")

    def __init__(self, keys: Sequence[int], path: list[_Block]) -> None:
        self.keys = keys
        self.path = path
        self.own = 0

    @property
    def next_key(self) -> int:
        """The key that it stores next; 0 when there is none."""
        depth = len(self.path)
        return self.keys[depth] if depth < len(self.keys) else 0


class BlockCache:
    """All blocks of a worker. `publish` is told each change of what can be found."""

    def __init__(self, blocks: int, publish: Callable[[Change], None]) -> None:
        self.total = blocks
        self._publish = publish
        self._blocks: dict[int, _Block] = {}
        self._leaves: list[tuple[int, int, _Block]] = []
        self._pinned = 0
        self._own = 0
        self._tick = 0
        self._serial = 0

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._blocks)

    @property
    def available(self) -> int:
        """Blocks that are free or can be evicted at once."""
        return self.total - self._pinned - self._own

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Iterate over (key, key of its parent or 0), parents first."""
        # A block is stored after its parent, and a dict keeps that order.
        return (
            (block.key, block.parent.key if block.parent else 0) for block in self._blocks.values()
        )

    def depth(self, keys: Sequence[int], limit: int) -> int:
        """How many of the leading `keys`, `limit` at most, can be found."""
        blocks = self._blocks
        low, high = 0, min(limit, len(keys))
        while low < high:
            middle = (low + high) // 2
            if keys[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    def open(self, keys: Sequence[int], limit: int, blocks: int) -> Chain | None:
        """Begin a chain of `blocks` blocks in all; None when there are not enough."""
        path = [self._blocks[key] for key in keys[: self.depth(keys, limit)]]
        newly = sum(1 for block in path if not block.refs)
        own = max(0, blocks - len(path))
        if own > self.available - newly:
            return None
        self._tick += 1
        for block in path:
            block.refs += 1
            block.tick = self._tick
        self._pinned += newly
        chain = Chain(keys, path)
        chain.own = own
        self._own += own
        self._evict(len(self._blocks) + self._own - self.total)
        return chain

    def store(self, chain: Chain, upto: int) -> None:
        """Put the chain's blocks before `upto` into the cache."""
        start = len(chain.path)
        fresh: list[int] = []
        for key in chain.keys[start:upto]:
            block = self._blocks.get(key)
            chain.own -= 1
            self._own -= 1
            if block is None:
                tip = chain.path[-1] if chain.path else None
                block = self._blocks[key] = _Block(key, tip, self._tick)
                if tip is not None:
                    tip.children += 1
                fresh.append(key)
                self._pinned += 1
            else:  # another chain was faster: its block serves both
                self._pinned += not block.refs
                block.refs += 1
            chain.path.append(block)
        if fresh:
            # What is new has no cached descendants, so it is one run to the end.
            at = len(chain.path) - len(fresh)
            self._publish(Stored(chain.path[at - 1].key if at else 0, tuple(fresh)))

    def close(self, chain: Chain) -> None:
        """End a chain: its cached blocks stay for others, its own ones are free."""
        self._own -= chain.own
        self._tick += 1
        for block in reversed(chain.path):
            block.refs -= 1
            block.tick = self._tick
            if not block.refs:
                self._pinned -= 1
                self._offer(block)
        chain.path, chain.own = [], 0

    def _offer(self, block: _Block) -> None:
        if not block.children:
            self._serial += 1
            heapq.heappush(self._leaves, (block.tick, self._serial, block))

    def _evict(self, count: int) -> None:
        gone: list[int] = []
        while len(gone) < count:
            tick, _, block = heapq.heappop(self._leaves)
            if block.refs or block.children or block.tick != tick or block.key not in self._blocks:
                continue
            del self._blocks[block.key]
            gone.append(block.key)
            parent = block.parent
            if parent is not None:
                parent.children -= 1
                if not parent.refs:
                    self._offer(parent)
        if gone:
            self._publish(Removed(tuple(gone)))
