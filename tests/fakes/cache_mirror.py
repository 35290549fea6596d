"""A naive copy of a prefix cache, made from its feed alone, and an audit of a cache's blocks.

What a router keeps, without any cleverness; it refuses a feed that breaks the
rules (unknown parent, child left behind, stored twice).
"""

from collections.abc import Iterable

from worker.kvcache.radix import Chain, PrefixCache
from worker.request import CacheChange, CacheDigest


class FeedBrokenError(AssertionError):
    """The feed says something that cannot be."""


class CacheMirror:
    """Keys and parents, as the feed tells them."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    @property
    def digest(self) -> CacheDigest:
        xor = 0
        for key in self.parents:
            xor ^= key
        return CacheDigest(block_count=len(self.parents), xor_keys=xor)

    def apply(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            kinds = (bool(change.stored), bool(change.removed), change.cleared)
            if sum(kinds) != 1:
                raise FeedBrokenError(f"{change} is not exactly one of three kinds")
            if change.cleared:
                self.parents.clear()
            self._store(change.parent, change.stored)
            for key in change.removed:
                self._remove(key)

    def _store(self, parent: int, keys: list[int]) -> None:
        for key in keys:
            if key in self.parents:
                raise FeedBrokenError(f"{key} is stored twice")
            if parent and parent not in self.parents:
                raise FeedBrokenError(f"{key} has an unknown parent {parent}")
            self.parents[key] = parent
            parent = key

    def _remove(self, key: int) -> None:
        if key not in self.parents:
            raise FeedBrokenError(f"{key} is removed and was not there")
        if key in self.parents.values():
            raise FeedBrokenError(f"{key} is removed before its children")
        del self.parents[key]


def audit(cache: PrefixCache, chains: Iterable[Chain]) -> None:
    """Check that every block is exactly one of free, cached, or owned by one chain."""
    free = list(cache._pool._free)
    cached = [node.block for node in cache._nodes.values()]
    chains = list(chains)
    private = [block for chain in chains for block in chain.table[len(chain.path) :]]
    cleared = {node.block for chain in chains for node in chain.path if not node.cached}
    everything = sorted([*free, *cached, *private, *cleared])
    assert everything == list(range(cache.total))
    used = {node for chain in chains for node in chain.path}
    for node in cache._nodes.values():
        assert node.refs == sum(node in chain.path for chain in chains)
        assert node.cached
        assert node.parent is not None
        assert node.parent.is_root or cache._nodes[node.parent.key] is node.parent
    idle = sum(node not in used for node in cache._nodes.values())
    assert cache.available == len(free) + idle
    namespaces = {node.namespace for node in cache._nodes.values()}
    assert set(cache._roots) == namespaces | {chain.root.namespace for chain in chains}
