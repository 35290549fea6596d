"""Over its budget the index forgets what it can best do without, tips first."""

import random

from router.tree.meta_tree import BYTES_PER_KEY, BYTES_PER_RUN, MetaTree

BLOCKS = 8
CHAIN_BYTES = BLOCKS * BYTES_PER_KEY + BYTES_PER_RUN


class Busy:
    """An index for so many prompts of eight blocks, with one replica."""

    def __init__(self, prompts: int) -> None:
        self.chance = random.Random(4)
        self.dropped = 0
        self.tree = MetaTree(budget_bytes=prompts * CHAIN_BYTES, on_evicted=self._count)
        self.replica = self.tree.join()

    def _count(self, blocks: int) -> None:
        self.dropped += blocks

    def keys(self, blocks: int = BLOCKS) -> list[int]:
        return [self.chance.getrandbits(64) | 1 for _ in range(blocks)]

    def store(self, keys: list[int], parent: int = 0) -> list[int]:
        self.tree.store(self.replica, parent, keys)
        return keys

    def depth(self, keys: list[int]) -> int:
        return self.tree.match(keys).get(self.replica, 0)

    def flood(self, prompts: int) -> None:
        """Prompts that nobody asks for again."""
        for _ in range(prompts):
            self.store(self.keys())


def test_a_prefix_that_is_asked_for_often_outlives_younger_ones_that_are_not() -> None:
    busy = Busy(500)
    asked, silent = busy.store(busy.keys()), busy.store(busy.keys())
    for _ in range(3):
        busy.depth(asked)
    busy.flood(1000)
    assert busy.depth(asked) == BLOCKS
    assert busy.depth(silent) == 0


def test_a_prefix_that_was_asked_for_long_ago_goes_at_last() -> None:
    busy = Busy(100)
    asked = busy.store(busy.keys())
    for _ in range(100):
        busy.depth(asked)
    busy.flood(5000)
    assert busy.depth(asked) == 0


def test_the_youngest_of_those_never_asked_for_stay() -> None:
    busy = Busy(200)
    chains = [busy.store(busy.keys()) for _ in range(600)]
    held = [bool(busy.tree.holds(busy.replica, chain[-1])) for chain in chains]
    assert all(held[-100:])
    assert not any(held[:300])


def test_what_is_asked_for_below_a_prefix_counts_for_the_prefix() -> None:
    """A system prompt: no request ends there, each one goes through it."""
    busy = Busy(300)
    system = busy.store(busy.keys())
    for _ in range(200):
        tail = busy.store(busy.keys(4), parent=system[-1])
        busy.depth([*system, *tail])
    busy.flood(2000)
    assert busy.depth(system) == BLOCKS


def test_tips_go_before_what_is_above_them() -> None:
    busy = Busy(50)
    stems = []
    for _ in range(40):
        stem = busy.store(busy.keys())
        stems.append((stem, [busy.store(busy.keys(3), parent=stem[-1]) for _ in range(3)]))
        assert busy.tree.cost_bytes <= 50 * CHAIN_BYTES
    indexed = busy.tree.keys_of(busy.replica)
    cut = 0
    for stem, tails in stems:
        chains = [[*stem, *tail] for tail in tails]
        for chain in chains:
            held = [key in indexed for key in chain]
            assert held == sorted(held, reverse=True)
        cut += stem[-1] in indexed and any(chain[-1] not in indexed for chain in chains)
    assert cut
    assert busy.tree.is_partial(busy.replica)


def test_a_prefix_is_not_taken_for_the_tail_that_it_became_one_run_with() -> None:
    busy = Busy(4)
    stem = busy.store(busy.keys(2))
    for blocks in (3, 10):
        busy.store(busy.keys(blocks), parent=stem[-1])
    for _ in range(5):
        busy.depth(stem)
    busy.store(busy.keys(32))
    assert busy.depth(stem) == 2


def test_one_prompt_longer_than_the_budget_keeps_its_beginning() -> None:
    busy = Busy(10)
    keys = busy.store(busy.keys(500))
    depth = busy.depth(keys)
    assert 60 <= depth <= 90
    assert busy.dropped == 500 - depth
    assert busy.tree.digest(busy.replica)[0] == 500


def test_what_nobody_holds_goes_first() -> None:
    """Even where the sweep has not come yet: stores pay for a part of it only."""
    busy = Busy(100)
    other = busy.tree.join()
    for _ in range(4):
        busy.tree.store(other, 0, busy.keys())
    kept = [busy.store(busy.keys()) for _ in range(95)]
    busy.tree.leave(other)
    busy.flood(2)
    assert [busy.depth(keys) for keys in kept] == [BLOCKS] * 95
    assert not busy.dropped


def test_the_budget_is_that_of_all_replicas_together() -> None:
    busy = Busy(100)
    for _ in range(50):
        replica = busy.tree.join()
        for _ in range(20):
            busy.tree.store(replica, 0, busy.keys())
            assert busy.tree.cost_bytes <= 100 * CHAIN_BYTES
    assert busy.dropped == 50 * 20 * BLOCKS - len(busy.tree)
    assert len(busy.tree) > 90 * BLOCKS
