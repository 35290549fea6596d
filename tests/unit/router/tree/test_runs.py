"""The inside of the meta-tree holds together, whatever it is told, and costs what it must."""

import random
import sys
import tracemalloc
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tree.meta_tree import BYTES_PER_KEY, BYTES_PER_RUN, FeedBroken, MetaTree
from tests.fakes.tree_audit import audit

KEYS = st.lists(st.integers(0, 12), max_size=6)
TOLD = st.lists(
    st.tuples(
        st.sampled_from(
            ["store"] * 4 + ["remove"] * 3 + ["pairs", "clear", "leave", "sweep", "ask"]
        ),
        st.integers(0, 2),
        st.integers(0, 12),
        KEYS,
    ),
    max_size=60,
)
BUDGETS = st.sampled_from([1 << 30, 6 * (BYTES_PER_KEY + BYTES_PER_RUN)])


class Told:
    """A tree that is told anything, true or not; who contradicts itself is cleared."""

    def __init__(self, budget: int) -> None:
        self.tree = MetaTree(budget_bytes=budget)
        self.replicas = [self.tree.join() for _ in range(3)]

    def tell(self, kind: str, index: int, key: int, keys: list[int]) -> None:
        tree, replica = self.tree, self.replicas[index]
        match kind:
            case "store":
                tree.store(replica, key, keys)
            case "remove":
                tree.remove(replica, keys)
            case "pairs":
                tree.store_pairs(replica, keys, [key, *reversed(keys)][: len(keys)])
            case "clear":
                tree.clear(replica)
            case "leave":
                tree.leave(replica)
                self.replicas[index] = tree.join()
            case "sweep":
                tree.sweep(key)
            case "ask":
                tree.match(keys)


@given(TOLD, BUDGETS)
@settings(max_examples=400, deadline=None)
def test_runs_fit_together_whatever_replicas_say(
    told: list[tuple[str, int, int, list[int]]], budget: int
) -> None:
    story = Told(budget)
    for kind, index, key, keys in told:
        try:
            story.tell(kind, index, key, keys)
        except FeedBroken:
            story.tree.clear(story.replicas[index])
        audit(story.tree)
        assert story.tree.cost_bytes <= budget
    for replica in story.replicas:
        story.tree.leave(replica)
    while not story.tree.sweep(3):
        audit(story.tree)
    assert (len(story.tree), story.tree.run_count) == (0, 0)


def test_replicas_that_follow_one_another_block_by_block_share_one_run() -> None:
    tree = MetaTree()
    one, two = tree.join(), tree.join()
    chain = list(range(1, 101))
    for replica in (one, two):
        for key in chain:
            tree.store(replica, key - 1, [key])
        assert tree.run_count == 1
    for key in reversed(chain[50:]):
        tree.remove(one, [key])
        assert tree.run_count == 2
    for key in reversed(chain[50:]):
        tree.remove(two, [key])
    assert tree.run_count == 1
    assert len(tree) == 50


def test_a_fork_is_one_run_again_when_its_branches_are_gone() -> None:
    tree = MetaTree()
    replica = tree.join()
    tree.store(replica, 0, [1, 2, 3, 4])
    tree.store(replica, 2, [10, 11])
    assert tree.run_count == 3
    tree.remove(replica, [11, 10])
    assert tree.run_count == 1
    audit(tree)


def come_and_go(tree: MetaTree, replica: int, chains: int, chance: random.Random) -> int:
    """Store unique chains and remove them again; return what they took at the most, in bytes."""
    made = [[chance.getrandbits(64) | 1 for _ in range(3)] for _ in range(chains)]
    for chain in made:
        tree.store(replica, 0, chain)
    assert len(tree) == 3 * chains
    taken = tracemalloc.get_traced_memory()[0]
    for chain in made:
        tree.remove(replica, chain[::-1])
    assert (len(tree), tree.run_count) == (0, 0)
    return taken


def test_unique_chains_that_come_and_go_leave_nothing() -> None:
    tree, chance = MetaTree(), random.Random(5)
    replica = tree.join()
    tracemalloc.start()
    taken = [come_and_go(tree, replica, 2_000, chance) for _ in range(5)]
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert min(taken) > 500_000
    assert left < 32 * 1024


def test_what_is_split_behind_the_back_of_a_sweep_is_swept_too() -> None:
    tree = MetaTree()
    gone, stays = tree.join(), tree.join()
    for first in range(1, 401, 4):
        tree.store(gone, 0, list(range(first, first + 4)))
    tree.store(stays, 0, [1, 2, 3, 4])
    tree.leave(gone)
    tree.sweep(60)
    tree.store(stays, 1, [1001])
    while not tree.sweep(10):
        pass
    heir = tree.join()
    assert tree.slot_count == 2
    assert tree.keys_of(heir) == set()
    assert tree.match([1, 2, 3, 4]) == {stays: 4}
    audit(tree)


def test_a_key_is_not_found_across_two_others() -> None:
    """The bytes of the third key stand between those of the first and the second, too."""
    tree = MetaTree()
    replica = tree.join()
    chain = [1 << 32, 1, 1 << 32 | 1, 9]
    tree.store(replica, 0, chain)
    tree.store(replica, chain[2], [77])
    assert tree.run_count == 3
    audit(tree)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_million_unique_chains_that_come_and_go_leave_nothing() -> None:
    tree, chance = MetaTree(), random.Random(7)
    replica = tree.join()
    for _ in range(20):
        come_and_go(tree, replica, 50_000, chance)
    runs = tree._runs
    columns = [runs.of, runs.masks, runs.keys, runs.parents, runs.children, runs.used, runs.hits]
    assert sum(map(sys.getsizeof, columns)) < 32 * 1024


def test_memory_comes_back_while_a_part_stays() -> None:
    chance = random.Random(6)
    tree = MetaTree()
    replicas = [tree.join() for _ in range(4)]
    chains = [[chance.getrandbits(64) | 1 for _ in range(4)] for _ in range(8_000)]
    tracemalloc.start()
    for index, chain in enumerate(chains):
        tree.store(replicas[index % 4], 0, list(map(int, map(str, chain))))
    full = tracemalloc.get_traced_memory()[0]
    for replica in replicas[1:]:
        tree.leave(replica)
    while not tree.sweep(1000):
        pass
    for chain in chains[40::4]:
        tree.remove(replicas[0], chain[::-1])
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(tree) == 40
    assert tree.match(chains[0]) == {replicas[0]: 4}
    assert left < full / 20
    audit(tree)


def test_the_count_of_what_it_costs_covers_what_it_costs() -> None:
    """Short runs and long ones, at a size at which the map has just grown."""
    for blocks in (1, 8, 64):
        chance = random.Random(blocks)
        tracemalloc.start()
        tree = MetaTree()
        replica = tree.join()
        while len(tree) < 22_500:
            tree.store(replica, 0, [chance.getrandbits(64) for _ in range(blocks)])
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert 0.5 * tree.cost_bytes < used < tree.cost_bytes


def test_what_it_costs_stays_below_its_budget_while_blocks_come_and_go() -> None:
    for keys in (5_000, 5_600, 7_000):
        chance = random.Random(keys)
        tracemalloc.start()
        tree = MetaTree(budget_bytes=keys * (BYTES_PER_KEY + BYTES_PER_RUN // 8))
        replica = tree.join()
        most = 0
        for _ in range(4 * keys // 8):
            tree.store(replica, 0, [chance.getrandbits(64) for _ in range(8)])
            most = max(most, sys.getsizeof(tree._runs.of) - 120 * len(tree))
        used = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(tree) > 0.9 * keys
        assert most < 16 * 1024
        assert 0.5 * tree.cost_bytes < used < tree.cost_bytes


def test_a_bad_key_is_refused_alone() -> None:
    tree = MetaTree()
    one, two = tree.join(), tree.join()
    tree.store(two, 0, [1, 2])
    for keys in ([3, -1], [3, 1 << 64], [3, 3], [0], [1, 2, 0], [1, 1]):
        with suppress(FeedBroken):
            tree.store(one, 0, keys)
            pytest.fail(f"{keys} were stored")
        tree.clear(one)
    assert tree.match([1, 2]) == {two: 2}
    audit(tree)
