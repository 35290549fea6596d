"""The meta-tree against a naive model: one dictionary of keys for each replica."""

import random
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tree.meta_tree import BYTES_PER_KEY, BYTES_PER_RUN, FeedBroken, MetaTree

Path = tuple[int, ...]
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


def keys_of(path: Path) -> list[int]:
    """The keys of all prefixes of a path; equal prefixes have equal keys."""
    return [
        1 + sum((digit + 1) * 4**index for index, digit in enumerate(path[:end]))
        for end in range(1, len(path) + 1)
    ]


class Model:
    """What each replica holds: key -> parent."""

    def __init__(self) -> None:
        self.held: dict[int, dict[int, int]] = {}

    def missing(self, replica: int, keys: Sequence[int]) -> tuple[int, list[int]]:
        held = self.held[replica]
        depth = self.depth(replica, keys)
        missing = list(keys[depth:])
        parent = keys[depth - 1] if depth else 0
        for key, above in zip(missing, [parent, *missing], strict=False):
            held[key] = above
        return parent, missing

    def leaf(self, replica: int, pick: int) -> int | None:
        held = self.held[replica]
        leaves = sorted(set(held) - set(held.values()))
        return leaves[pick % len(leaves)] if leaves else None

    def depth(self, replica: int, keys: Sequence[int]) -> int:
        held = self.held[replica]
        return next((index for index, key in enumerate(keys) if key not in held), len(keys))

    def digest(self, replica: int) -> tuple[int, int]:
        xor = 0
        for key in self.held[replica]:
            xor ^= key
        return len(self.held[replica]), xor


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "remove", "remove", "clear", "leave", "sweep"]),
        st.integers(0, 3),
        PATHS,
        st.integers(0, 20),
    ),
    max_size=80,
)


class Pair:
    """The tree and the model, given the same operations."""

    def __init__(self, tree: MetaTree) -> None:
        self.tree = tree
        self.model = Model()
        self.replicas = [self.join() for _ in range(4)]

    def join(self) -> int:
        replica = self.tree.join()
        self.model.held[replica] = {}
        return replica

    def do(self, kind: str, index: int, path: Path, pick: int) -> None:
        replica = self.replicas[index]
        match kind:
            case "store":
                parent, missing = self.model.missing(replica, keys_of(path))
                if missing:
                    self.tree.store(replica, parent, missing)
            case "remove":
                leaf = self.model.leaf(replica, pick)
                if leaf is not None:
                    del self.model.held[replica][leaf]
                    self.tree.remove(replica, [leaf])
            case "clear":
                self.model.held[replica] = {}
                self.tree.clear(replica)
            case "leave":
                del self.model.held[replica]
                self.tree.leave(replica)
                self.replicas[index] = self.join()
            case "sweep":
                self.tree.sweep(pick)


@given(OPERATIONS, PATHS)
@settings(max_examples=150, deadline=None)
def test_it_equals_a_dictionary_for_each_replica_whatever_happens(
    operations: list[tuple[str, int, Path, int]], asked: Path
) -> None:
    pair = Pair(MetaTree())
    for operation in operations:
        pair.do(*operation)
        depths = pair.tree.match(keys_of(asked))
        for replica in pair.replicas:
            assert pair.tree.keys_of(replica) == set(pair.model.held[replica])
            assert pair.tree.digest(replica) == pair.model.digest(replica)
            assert depths.get(replica, 0) == pair.model.depth(replica, keys_of(asked))
    while not pair.tree.sweep(7):
        pass
    assert len(pair.tree) == len(set().union(*pair.model.held.values()))


@given(OPERATIONS, PATHS)
@settings(max_examples=100, deadline=None)
def test_over_its_budget_it_forgets_but_never_invents(
    operations: list[tuple[str, int, Path, int]], asked: Path
) -> None:
    limit = 8
    pair = Pair(MetaTree(budget_bytes=limit * BYTES_PER_KEY))
    for operation in operations:
        pair.do(*operation)
        assert len(pair.tree) <= limit
        depths = pair.tree.match(keys_of(asked))
        for replica in pair.replicas:
            indexed, held = pair.tree.keys_of(replica), pair.model.held[replica]
            assert indexed <= set(held)
            assert all(held[key] == 0 or held[key] in indexed for key in indexed)
            assert pair.tree.digest(replica) == pair.model.digest(replica)
            assert depths.get(replica, 0) <= pair.model.depth(replica, keys_of(asked))
            assert pair.tree.is_partial(replica) or indexed == set(held)


def test_what_was_of_use_longest_ago_goes_first() -> None:
    room = 5 * BYTES_PER_KEY + 4 * BYTES_PER_RUN
    tree = MetaTree(budget_bytes=room + room // 16)
    replica = tree.join()
    tree.store(replica, 0, [1, 2])
    tree.store(replica, 1, [3])
    tree.store(replica, 0, [10, 11])
    tree.match([1, 2])
    tree.store(replica, 0, [20, 21, 22])
    assert tree.keys_of(replica) == {1, 2, 10, 20, 21, 22}
    assert tree.is_partial(replica)
    assert tree.digest(replica) == (8, 1 ^ 2 ^ 3 ^ 10 ^ 11 ^ 20 ^ 21 ^ 22)


def test_one_replicas_eviction_leaves_the_others_prefix() -> None:
    tree = MetaTree()
    one, two = tree.join(), tree.join()
    tree.store(one, 0, [1, 2, 3])
    tree.store(two, 0, [1, 2, 3])
    tree.remove(one, [3, 2])
    assert tree.match([1, 2, 3]) == {one: 1, two: 3}


def test_a_replica_that_is_cleared_matches_nothing_before_any_sweep() -> None:
    tree = MetaTree()
    one, two = tree.join(), tree.join()
    tree.store(one, 0, [1, 2])
    tree.store(two, 0, [1])
    tree.clear(one)
    assert tree.match([1, 2]) == {two: 1}
    tree.store(one, 0, [1])
    assert tree.match([1, 2]) == {one: 1, two: 1}


def test_a_bit_is_used_again_only_after_its_sweep() -> None:
    tree = MetaTree()
    one = tree.join()
    tree.store(one, 0, list(range(1, 200)))
    tree.leave(one)
    two = tree.join()
    assert tree.slot_count == 2
    assert tree.match([1, 2]) == {}
    while not tree.sweep(50):
        pass
    tree.join()
    assert tree.slot_count == 2
    assert tree.keys_of(two) == set()


@pytest.mark.parametrize("leaves", [False, True])
def test_bits_that_wait_for_a_sweep_are_bounded(leaves: bool) -> None:
    tree = MetaTree()
    chance = random.Random(5)

    def store(replica: int) -> None:
        tree.store(replica, 0, [chance.getrandbits(64) | 1])

    steady, replica = tree.join(), tree.join()
    for _ in range(20_000):
        store(steady)
    for _ in range(8_000):
        store(replica)
        if leaves:
            tree.leave(replica)
            replica = tree.join()
        else:
            tree.clear(replica)
    assert tree.slot_count < 2_000
    assert tree.digest(steady)[0] == 20_000
    assert len(tree.keys_of(steady)) == 20_000
    assert tree.keys_of(replica) == set()


def test_who_takes_over_a_bit_is_not_taken_for_who_had_it() -> None:
    tree = MetaTree()
    replicas = [tree.join() for _ in range(3)]
    for _ in range(3):
        for replica in replicas:
            tree.store(replica, 0, [1, 2])
        assert tree.match([1, 2]) == dict.fromkeys(replicas, 2)
        for replica in replicas:
            tree.leave(replica)
        while not tree.sweep(10):
            pass
        replicas = [tree.join() for _ in range(3)]
    assert tree.slot_count == 3


@pytest.mark.parametrize(
    ("parent", "keys", "why"),
    [(99, [5], "parent"), (0, [1], "already"), (1, [2], "already"), (0, [0], "no key")],
)
def test_a_contradiction_is_refused(parent: int, keys: list[int], why: str) -> None:
    tree = MetaTree()
    replica = tree.join()
    tree.store(replica, 0, [1, 2])
    with pytest.raises(FeedBroken, match=why):
        tree.store(replica, parent, keys)


def test_removing_what_another_replica_holds_is_refused() -> None:
    tree = MetaTree()
    one, two = tree.join(), tree.join()
    tree.store(one, 0, [1])
    with pytest.raises(FeedBroken):
        tree.remove(two, [1])


def test_a_parent_removed_before_its_child_does_not_break_the_index() -> None:
    tree = MetaTree()
    replica = tree.join()
    tree.store(replica, 0, [1, 2])
    tree.remove(replica, [1, 2])
    assert len(tree) == 0


def test_pairs_store_a_forest() -> None:
    tree = MetaTree()
    replica = tree.join()
    tree.store_pairs(replica, [1, 2, 5, 3, 6], [0, 1, 0, 1, 5])
    assert tree.match([1, 3]) == {replica: 2}
    assert tree.match([5, 6]) == {replica: 2}
    with pytest.raises(FeedBroken):
        tree.store_pairs(replica, [7, 8], [0])


def test_a_thousand_replicas_that_come_and_go_leave_nothing() -> None:
    chance = random.Random(3)
    chains = [[chance.getrandbits(63) + 1 for _ in range(20)] for _ in range(50)]

    def churn(rounds: int) -> None:
        for _ in range(rounds):
            replica = tree.join()
            for chain in chains:
                tree.store(replica, 0, chain)
            tree.leave(replica)
        while not tree.sweep(1000):
            pass

    tracemalloc.start()
    tree = MetaTree()
    churn(20)
    before = tracemalloc.get_traced_memory()[0]
    churn(1000)
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(tree) == 0
    assert tree.slot_count < 20
    assert after - before < 16 * 1024


def test_unique_suffixes_under_one_prompt_come_and_go_without_trace() -> None:
    tree = MetaTree()
    replica = tree.join()
    tree.store(replica, 0, [1, 2, 3])
    for key in range(10, 20_000, 2):
        tree.store(replica, 3, [key, key + 1])
        tree.remove(replica, [key + 1, key])
    assert len(tree) == 3
    assert tree.match([1, 2, 3, 10]) == {replica: 3}


def test_a_look_up_probes_few_keys() -> None:
    """256 blocks over 64 replicas of all depths: under three probes a block."""

    class Counting(dict[int, int]):
        probes = 0

        def get(self, key: int, default: int = 0) -> int:  # type: ignore[override]
            Counting.probes += 1
            return super().get(key, default)

    tree = MetaTree()
    chain = list(range(1, 257))
    replicas = [tree.join() for _ in range(64)]
    for index, replica in enumerate(replicas):
        tree.store(replica, 0, chain[: 4 * index + 1])
    tree._runs.of = Counting(tree._runs.of)
    depths = tree.match(chain)
    assert depths == {replica: 4 * index + 1 for index, replica in enumerate(replicas)}
    assert Counting.probes < 256
    same = MetaTree()
    for _ in range(64):
        same.store(same.join(), 0, chain)
    same._runs.of, Counting.probes = Counting(same._runs.of), 0
    assert set(same.match(chain).values()) == {256}
    assert Counting.probes <= 10
