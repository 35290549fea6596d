"""Whatever happens to a prefix cache: no block is lost, no prefix is invented, the feed is true."""

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from radixmesh.blocks import Namespace, pack_ids
from tests.fakes.cache_mirror import CacheMirror, audit
from worker.kvcache.keyed import KeyedIds
from worker.kvcache.radix import Chain, PrefixCache

BLOCK = 2
IDS = st.lists(st.integers(0, 1), min_size=1, max_size=10)
SALTS = st.sampled_from(("a", "b"))


class CacheMachine(RuleBasedStateMachine):
    """Random requests on twelve blocks, against a naive list of all prefixes that are held."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(block_count=12, block_tokens=BLOCK)
        self.mirror = CacheMirror()
        self.open: list[tuple[Chain, KeyedIds]] = []

    def held(self) -> set[tuple[bytes, tuple[int, ...]]]:
        """Every cached prefix, read off the nodes' own ids; knows no keys."""
        prefixes = set()
        for node in self.cache._nodes.values():
            ids: tuple[int, ...] = ()
            at = node
            while at.parent is not None:
                ids = (*at.ids, *ids)
                at = at.parent
            prefixes.add((at.namespace, ids))
        return prefixes

    def longest(self, ids: Sequence[int], namespace: bytes) -> int:
        held = self.held()
        count = 0
        while (namespace, tuple(ids[: (count + 1) * BLOCK])) in held:
            count += 1
            if (count + 1) * BLOCK > len(ids):
                break
        return count

    @rule(ids=IDS, salt=SALTS)
    def begin(self, ids: list[int], salt: str) -> None:
        namespace = Namespace(model="m", cache_salt=salt).encode()
        keyed = KeyedIds(pack_ids(ids), namespace=namespace, block_tokens=BLOCK)
        expected = self.longest(ids, namespace)
        assert self.cache.matched_blocks(keyed, len(keyed.keys)) == expected
        chain = self.cache.open(keyed, len(keyed.keys))
        assert len(chain.path) == expected
        if self.cache.grow(chain, self.cache.blocks_for(len(ids))):
            self.open.append((chain, keyed))
        else:
            self.cache.close(chain)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        chain, keyed = data.draw(st.sampled_from(self.open))
        least = len(chain.path) * BLOCK
        self.cache.store(chain, keyed, data.draw(st.integers(least, len(keyed))))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        chain, keyed = data.draw(st.sampled_from(self.open))
        if self.cache.grow(chain, self.cache.blocks_for(len(keyed) + 1)):
            keyed.append(token)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        chain, _ = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.cache.close(chain)

    @rule()
    def clear(self) -> None:
        count = self.cache.digest.block_count
        assert self.cache.clear() == count

    @invariant()
    def no_block_is_lost(self) -> None:
        audit(self.cache, [chain for chain, _ in self.open])

    @invariant()
    def the_feed_tells_the_cache(self) -> None:
        self.mirror.apply(self.cache.take_changes())
        naive = {
            node.key: 0 if node.parent is None else node.parent.key
            for node in self.cache._nodes.values()
        }
        assert self.mirror.parents == naive
        assert self.mirror.digest == self.cache.digest

    def teardown(self) -> None:
        for chain, _ in self.open:
            self.cache.close(chain)
        assert self.cache.available == self.cache.total


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
