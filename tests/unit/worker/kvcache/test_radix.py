"""What the prefix cache finds, keeps, evicts and tells."""

from collections.abc import Sequence

from radixmesh.blocks import Namespace, block_keys, pack_ids
from tests.fakes.cache_mirror import CacheMirror, audit
from worker.kvcache.keyed import KeyedIds
from worker.kvcache.radix import Chain, PrefixCache
from worker.request import CacheChange, CacheDigest

BLOCK = 4


def keyed(ids: Sequence[int], salt: str = "") -> KeyedIds:
    namespace = Namespace(model="tiny", cache_salt=salt).encode()
    return KeyedIds(pack_ids(ids), namespace=namespace, block_tokens=BLOCK)


def run(cache: PrefixCache, ids: KeyedIds) -> Chain:
    """Compute all ids of a request; its chain stays open."""
    chain = cache.open(ids, len(ids.keys))
    assert cache.grow(chain, cache.blocks_for(len(ids)))
    cache.store(chain, ids, len(ids))
    return chain


def cache_of(blocks: int) -> PrefixCache:
    return PrefixCache(block_count=blocks, block_tokens=BLOCK)


def test_keys_are_those_that_a_router_computes() -> None:
    ids = keyed(range(10))
    ids.append(10)
    ids.append(11)
    seed = Namespace(model="tiny").seed()
    assert ids.keys == block_keys(pack_ids(range(12)), block_tokens=BLOCK, seed=seed)


def test_a_first_block_that_output_completes_has_the_router_s_key() -> None:
    ids = keyed([1, 2, 3])
    ids.append(4)
    seed = Namespace(model="tiny").seed()
    assert ids.keys == block_keys(pack_ids([1, 2, 3, 4]), block_tokens=BLOCK, seed=seed)


def test_blocks_of_an_ended_request_are_found_again() -> None:
    cache = cache_of(8)
    first = run(cache, keyed(range(10)))
    blocks = first.table[:2]
    cache.close(first)
    assert cache.open(keyed(range(12)), 3).table == blocks
    assert cache.available == 6


def test_a_match_ends_where_ids_differ() -> None:
    cache = cache_of(8)
    cache.close(run(cache, keyed(range(12))))
    assert cache.matched_blocks(keyed([0, 1, 2, 3, 9, 9, 9, 9]), 2) == 1
    assert cache.matched_blocks(keyed([9, 9, 9, 9]), 1) == 0


def test_a_match_takes_no_more_blocks_than_asked_for() -> None:
    cache = cache_of(8)
    cache.close(run(cache, keyed(range(12))))
    assert len(cache.open(keyed(range(12)), 2).table) == 2


def test_namespaces_share_nothing() -> None:
    cache = cache_of(8)
    cache.close(run(cache, keyed(range(8), salt="a")))
    assert cache.matched_blocks(keyed(range(8), salt="b"), 2) == 0
    assert cache.matched_blocks(keyed(range(8), salt="a"), 2) == 2


def test_a_collision_of_keys_is_a_miss_and_never_another_s_block() -> None:
    cache = cache_of(8)
    first = keyed([1, 2, 3, 4])
    second = keyed([5, 6, 7, 8])
    second.keys = list(first.keys)
    run(cache, first)
    chain = run(cache, second)
    assert chain.private
    assert chain.path == []
    assert cache.matched_blocks(second, 1) == 0
    assert cache.digest.block_count == 1


def test_a_collision_of_whole_namespaces_is_a_miss() -> None:
    cache = cache_of(8)
    run(cache, keyed(range(4), salt="a"))
    other = keyed(range(4), salt="b")
    other.keys = keyed(range(4), salt="a").keys
    assert cache.matched_blocks(other, 1) == 0
    chain = run(cache, other)
    assert chain.private
    cache.close(chain)
    assert cache.available == 7


def test_nothing_is_stored_behind_a_block_that_could_not_be() -> None:
    cache = cache_of(8)
    first = run(cache, keyed([1, 2, 3, 4]))
    second = keyed([5, 6, 7, 8, 9, 10, 11, 12])
    second.keys[0] = keyed([1, 2, 3, 4]).keys[0]
    chain = run(cache, second)
    assert cache.digest.block_count == 1
    audit(cache, [first, chain])


def test_key_zero_is_never_stored_because_it_means_no_parent() -> None:
    cache = cache_of(4)
    ids = keyed(range(4))
    ids.keys = [0]
    assert run(cache, ids).private
    assert cache.take_changes() == []


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache = cache_of(4)
    old, new = keyed([1, 1, 1, 1, 2, 2, 2, 2]), keyed([3, 3, 3, 3])
    cache.close(run(cache, old))
    cache.close(run(cache, new))
    cache.take_changes()
    run(cache, keyed(range(20, 28)))
    assert [change.removed for change in cache.take_changes() if change.removed] == [[old.keys[1]]]
    assert cache.matched_blocks(old, 2) == 1
    assert cache.matched_blocks(new, 1) == 1


def test_use_protects_from_eviction() -> None:
    cache = cache_of(4)
    old, new = keyed([1, 1, 1, 1]), keyed([3, 3, 3, 3])
    cache.close(run(cache, old))
    cache.close(run(cache, new))
    cache.close(cache.open(old, 1))
    cache.close(run(cache, keyed(range(20, 32))))
    assert cache.matched_blocks(old, 1) == 1
    assert cache.matched_blocks(new, 1) == 0


def test_blocks_in_use_are_never_evicted() -> None:
    cache = cache_of(4)
    chain = run(cache, keyed(range(12)))
    other = cache.open(keyed([9]), 0)
    assert not cache.grow(other, 2)
    assert other.table == []
    assert cache.grow(other, 1)
    audit(cache, [chain, other])


def test_two_requests_that_compute_the_same_block_end_up_with_one() -> None:
    cache = cache_of(8)
    ids, same = keyed(range(8)), keyed(range(8))
    chains = [cache.open(one, 2) for one in (ids, same)]
    for chain, one in zip(chains, (ids, same), strict=True):
        assert cache.grow(chain, 2)
        cache.store(chain, one, 8)
    assert chains[0].table == chains[1].table
    assert cache.take_changes() == [CacheChange(parent=0, stored=ids.keys)]
    audit(cache, chains)


def test_a_run_of_blocks_is_one_change_and_follows_its_parent() -> None:
    cache = cache_of(8)
    ids = keyed(range(16))
    chain = cache.open(ids, 4)
    cache.grow(chain, 4)
    cache.store(chain, ids, 9)
    assert cache.take_changes() == [CacheChange(parent=0, stored=ids.keys[:2])]
    cache.store(chain, ids, 16)
    assert cache.take_changes() == [CacheChange(parent=ids.keys[1], stored=ids.keys[2:])]


def test_eviction_tells_children_before_parents() -> None:
    cache = cache_of(3)
    ids = keyed(range(12))
    cache.close(run(cache, ids))
    cache.take_changes()
    cache.grow(cache.open(keyed([99]), 0), 3)
    assert cache.take_changes() == [CacheChange(removed=ids.keys[::-1])]
    assert cache.digest == CacheDigest(block_count=0, xor_keys=0)


def test_a_block_that_comes_back_is_told_again() -> None:
    cache = cache_of(2)
    mirror = CacheMirror()
    for ids in (range(8), range(50, 58), range(8)):
        cache.close(run(cache, keyed(ids)))
        mirror.apply(cache.take_changes())
    assert mirror.parents.keys() == set(keyed(range(8)).keys)


def test_cleared_blocks_are_not_found_but_stay_until_their_request_ends() -> None:
    cache = cache_of(6)
    idle, used = keyed([1] * 4), keyed(range(12))
    cache.close(run(cache, idle))
    chain = run(cache, used)
    table = list(chain.table)
    assert cache.clear() == 4
    assert chain.table == table
    assert cache.available == 3
    assert cache.matched_blocks(used, 3) == 0
    audit(cache, [chain])
    cache.close(chain)
    assert cache.available == 6
    audit(cache, [])


def test_a_request_that_runs_through_a_clear_stores_nothing_below_what_was_cleared() -> None:
    cache = cache_of(6)
    ids = keyed(range(12))
    chain = cache.open(ids, 0)
    cache.grow(chain, 3)
    cache.store(chain, ids, 4)
    cache.clear()
    cache.store(chain, ids, 12)
    assert cache.digest.block_count == 0
    assert cache.take_changes() == [CacheChange(cleared=True)]
    cache.close(chain)
    assert cache.available == 6


def test_a_request_that_had_stored_nothing_before_a_clear_stores_after_it() -> None:
    cache = cache_of(6)
    ids = keyed(range(8))
    chain = cache.open(ids, 0)
    cache.grow(chain, 2)
    cache.clear()
    cache.store(chain, ids, 8)
    cache.close(chain)
    assert cache.matched_blocks(keyed(range(8)), 2) == 2


def test_salts_that_nobody_uses_any_more_leave_nothing_behind() -> None:
    cache = cache_of(2)
    for number in range(1000):
        cache.close(run(cache, keyed(range(8), salt=str(number))))
    assert len(cache._roots) == 1
    assert len(cache._nodes) == 2
    assert len(cache._order._heap) < 100


def test_a_hot_prefix_does_not_grow_the_eviction_order() -> None:
    cache = cache_of(2)
    cache.close(run(cache, keyed(range(8))))
    for _ in range(1000):
        cache.close(cache.open(keyed(range(8)), 2))
    assert len(cache._order._heap) < 100
