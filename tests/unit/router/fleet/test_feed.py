"""A replica's feed, step by step: the view is proven equal to the cache, or marked."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from router.fleet.changes import Chunk, Cleared, Digest, Removed, Stored
from router.fleet.feed import (
    REORDER_S,
    REORDER_WINDOW,
    REST_MAX_S,
    SILENCE_S,
    SNAPSHOT_TIMEOUT_S,
    Feed,
    Index,
)
from router.fleet.held import HELD_KEYS_LIMIT
from router.fleet.untold import MUTE_DIGESTS
from router.policy.choice import View
from router.tree.meta_tree import BYTES_PER_KEY, BYTES_PER_RUN, MetaTree

CHAIN = [1, 2, 3]


class Rig:
    """A feed that is attached, with what it asked for and lost."""

    def __init__(self) -> None:
        self.tree = MetaTree()
        self.asked = 0
        self.lost: list[float] = []
        index = Index(self.tree)
        self.feed = Feed(index, ask=self._ask, on_lost=self.lost.append, name="g/0")
        self.feed.begin(0.0)

    def _ask(self) -> None:
        self.asked += 1

    def view(self) -> View:
        return self.feed.view

    @property
    def keys(self) -> set[int]:
        return self.tree.keys_of(self.feed.number)

    def snapshot(self, as_of: int, keys: list[int], now: float = 0.0) -> None:
        parents = [0, *keys][: len(keys)]
        self.feed.on_chunk(Chunk(as_of, keys, parents, first=True, last=True), now)

    def prove(self, sequence: int, now: float = 0.0, *, wrong: int = 0) -> None:
        xor = 0
        for key in self.keys:
            xor ^= key
        self.feed.on_digest(Digest(sequence, len(self.keys) + wrong, xor), now)

    def miss(self, now: float) -> None:
        self.feed.on_change(12, Stored(3, [4]), now)
        self.feed.tick(now + REORDER_S + 0.1)

    def miss_with_digest(self, now: float) -> None:
        self.feed.on_change(12, Stored(3, [4]), now)
        self.prove(12, now)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def live() -> Rig:
    rig = Rig()
    rig.snapshot(10, CHAIN)
    return rig


def test_it_is_not_trusted_before_its_snapshot_is_complete(rig: Rig) -> None:
    rig.feed.on_chunk(Chunk(4, [1], [0], first=True), 0.0)
    assert rig.view() is View.DEGRADED
    rig.feed.on_chunk(Chunk(4, [2], [1], last=True), 0.0)
    assert rig.view() is View.EXACT
    assert rig.keys == {1, 2}


def test_changes_that_overtake_the_snapshot_wait_for_it(rig: Rig) -> None:
    rig.feed.on_change(12, Removed([3]), 0.0)
    rig.feed.on_change(11, Stored(3, [4]), 0.0)
    rig.feed.on_change(10, Stored(0, [99]), 0.0)
    rig.feed.on_change(13, Stored(2, [5]), 0.0)
    rig.snapshot(12, [1, 2])
    assert rig.keys == {1, 2, 5}
    assert rig.view() is View.EXACT


def test_changes_follow_one_another(live: Rig) -> None:
    live.feed.on_change(11, Stored(3, [4, 5]), 0.0)
    live.feed.on_change(12, Removed([5, 4]), 0.0)
    live.feed.on_change(13, Stored(1, [7]), 0.0)
    assert live.keys == {1, 2, 3, 7}
    live.feed.on_change(14, Cleared(), 0.0)
    live.prove(14)
    assert live.keys == set()
    assert live.view() is View.EXACT


def test_a_change_that_comes_twice_counts_once(live: Rig) -> None:
    live.feed.on_change(11, Stored(3, [4]), 0.0)
    live.feed.on_change(11, Stored(3, [4]), 0.0)
    live.feed.on_change(9, Removed([1]), 0.0)
    live.prove(11)
    assert live.view() is View.EXACT
    assert live.asked == 0


def test_changes_in_the_wrong_order_are_put_in_order(live: Rig) -> None:
    live.feed.on_change(13, Stored(5, [6]), 0.0)
    live.feed.on_change(12, Stored(4, [5]), 0.1)
    assert live.keys == {1, 2, 3}
    assert live.view() is View.DEGRADED
    live.feed.on_change(11, Stored(3, [4]), 0.2)
    live.prove(13, 0.2)
    live.feed.tick(5.0)
    assert live.keys == {1, 2, 3, 4, 5, 6}
    assert live.view() is View.EXACT
    assert live.lost == [0.0]
    assert live.asked == 1  # in vain, and no strike
    live.snapshot(13, [1, 2, 3, 4, 5, 6], 5.0)
    assert live.view() is View.EXACT


def test_late_changes_are_no_failures_however_many_come(live: Rig) -> None:
    for last in range(10, 50, 2):
        first = last << 20
        live.feed.on_change(last + 2, Stored(0, range(first, first + (1 << 13))), 0.0)
        live.feed.on_change(last + 1, Stored(0, [last + 1]), 0.0)
        assert live.view() is View.EXACT
    live.feed.on_change(99, Stored(0, [99]), 0.0)
    assert live.view() is View.DEGRADED


def test_what_came_too_early_follows_the_repair(live: Rig) -> None:
    live.feed.on_change(12, Removed([3]), 0.0)
    live.feed.tick(1.0)
    assert live.view() is View.DEGRADED
    assert live.asked == 1
    live.snapshot(11, CHAIN, 1.1)
    assert live.keys == {1, 2}
    assert live.view() is View.EXACT


BREAKS: dict[str, Callable[[Rig], None]] = {
    "gap": lambda rig: rig.feed.on_change(12 + REORDER_WINDOW, Stored(3, [4]), 1.0),
    "a change that stays away": lambda rig: rig.miss(1.0),
    "digest after a change that stays away": lambda rig: rig.miss_with_digest(1.0),
    "unknown parent": lambda rig: rig.feed.on_change(11, Stored(77, [4]), 1.0),
    "removed what is not there": lambda rig: rig.feed.on_change(11, Removed([77]), 1.0),
    "digest differs": lambda rig: rig.prove(10, 1.0, wrong=1),
    "digest ahead": lambda rig: rig.prove(11, 1.0),
    "digest of another cache of that size": lambda rig: rig.feed.on_digest(Digest(10, 3, 9), 1.0),
    "stored what is there": lambda rig: rig.feed.on_change(11, Stored(2, [3]), 1.0),
    "stored twice at once": lambda rig: rig.feed.on_change(11, Stored(3, [4, 4]), 1.0),
    "stored key 0": lambda rig: rig.feed.on_change(11, Stored(3, [4, 0]), 1.0),
    "stored no number of 64 bits": lambda rig: rig.feed.on_change(11, Stored(3, [1 << 64]), 1.0),
    "removed twice at once": lambda rig: rig.feed.on_change(11, Removed([3, 3]), 1.0),
    "removed key 0": lambda rig: rig.feed.on_change(11, Removed([0]), 1.0),
    "silence": lambda rig: rig.feed.tick(SILENCE_S + 0.1),
    "another snapshot": lambda rig: rig.feed.on_chunk(Chunk(11, [1], [0], first=True), 1.0),
}


@pytest.mark.parametrize("how", BREAKS)
def test_what_breaks_the_feed_costs_the_view_at_once(live: Rig, how: str) -> None:
    BREAKS[how](live)
    assert live.view() is View.DEGRADED
    assert len(live.lost) == 1
    if how != "another snapshot":
        assert live.keys == set()
        assert live.asked == 1


def test_changes_after_a_gap_are_applied_after_the_repair_in_order(live: Rig) -> None:
    """Stored(4) is lost, Removed(4) comes live, the repair comes late: 4 stays away."""
    live.feed.on_change(12, Removed([4]), 0.0)
    live.feed.on_change(13, Stored(2, [6]), 0.0)
    live.snapshot(11, [1, 2, 3, 4])
    assert live.keys == {1, 2, 3, 6}
    assert live.view() is View.EXACT


def test_a_snapshot_older_than_the_gap_does_not_repair_it(live: Rig) -> None:
    live.feed.on_change(12, Stored(3, [5]), 0.0)
    live.feed.tick(REORDER_S + 0.1)
    live.snapshot(10, CHAIN, 1.0)
    live.feed.tick(1.0 + REORDER_S + 0.1)
    assert live.view() is View.DEGRADED
    assert live.asked == 2
    live.snapshot(12, [1, 2, 3])
    assert live.view() is View.EXACT


def test_a_digest_held_back_is_checked_after_the_snapshot(rig: Rig) -> None:
    rig.feed.on_digest(Digest(10, 9, 9), 0.0)
    rig.snapshot(10, CHAIN)
    assert rig.view() is View.DEGRADED


def test_three_failures_within_a_minute_make_it_blind_and_retries_back_off(live: Rig) -> None:
    for now in (1.0, 2.0, 3.0):
        live.prove(10, now, wrong=1)
        if now < 3.0:
            live.snapshot(10, CHAIN, now)
    assert live.view() is View.BLIND
    assert live.asked == 2
    asked_at = []
    now = 3.0
    while now < 400:
        before = live.asked
        live.feed.tick(now)
        if live.asked > before:
            asked_at.append(now)
            assert live.view() is View.BLIND
        now += 0.5
    gaps = [after - before for before, after in pairwise(asked_at)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= REST_MAX_S + SNAPSHOT_TIMEOUT_S + 1
    assert len(asked_at) < 12
    live.feed.tick(1000.0)
    live.snapshot(10, CHAIN, 1000.0)
    assert live.view() is View.EXACT


def test_a_replica_that_never_sends_a_snapshot_ends_blind(rig: Rig) -> None:
    now = 0.0
    while rig.view() is not View.BLIND:
        assert rig.view() is View.DEGRADED
        now += 1.0
        rig.feed.tick(now)
    assert 3 * SNAPSHOT_TIMEOUT_S <= now <= 3 * SNAPSHOT_TIMEOUT_S + 5


def test_what_is_held_back_is_bounded(rig: Rig) -> None:
    for sequence in range(1, 1000):
        rig.feed.on_change(sequence, Stored(0, range(1, 1000)), 0.0)
        assert rig.feed._held.size <= HELD_KEYS_LIMIT
    rig.snapshot(0, [])
    assert rig.view() is View.DEGRADED


def test_what_is_forgotten_because_it_came_too_early_is_not_taken_for_whole(live: Rig) -> None:
    live.feed.on_change(12, Stored(0, list(range(100, 101 + HELD_KEYS_LIMIT))), 0.0)
    live.feed.on_change(11, Stored(3, [4]), 0.0)
    assert live.view() is View.DEGRADED
    live.snapshot(12, [*CHAIN, 4])
    live.prove(12)
    assert live.view() is View.EXACT


def test_a_change_that_is_held_and_comes_again_is_held_once(rig: Rig) -> None:
    for _ in range(3):
        rig.feed.on_change(11, Stored(3, [4]), 0.0)
    assert rig.feed._held.size == 2


def test_a_stored_block_confirms_its_mark(live: Rig) -> None:
    live.tree.mark(live.feed.number, [1, 2, 3, 4, 5])
    live.feed.on_change(11, Stored(3, [4]), 0.0)
    assert live.tree.marked_count == 1
    live.prove(99)
    live.snapshot(12, [1, 2, 3, 4, 5])
    assert live.tree.marked_count == 0


def test_the_end_of_the_link_leaves_nothing(live: Rig) -> None:
    live.tree.mark(live.feed.number, [1, 2, 3, 4, 5])
    live.feed.stop(1.0)
    live.snapshot(11, CHAIN)
    live.feed.on_change(12, Stored(0, [9]), 1.0)
    live.feed.tick(1000.0)
    assert live.keys == set()
    assert live.tree.marked_count == 0
    assert live.asked == 0


def test_keys_that_the_budget_drops_still_count_for_the_proof() -> None:
    rig = Rig()
    rig.tree._budget = 3 * BYTES_PER_KEY + 2 * BYTES_PER_RUN
    rig.snapshot(1, [1, 2, 3])
    rig.feed.on_change(2, Stored(0, [10, 11, 12]), 0.0)
    assert rig.tree.is_partial(rig.feed.number)
    rig.feed.on_change(3, Stored(3, [4]), 0.0)
    rig.feed.on_change(4, Removed([4]), 0.0)
    rig.feed.on_digest(Digest(4, 6, 1 ^ 2 ^ 3 ^ 10 ^ 11 ^ 12), 0.0)
    assert rig.view() is View.EXACT
    assert rig.keys == {10, 11, 12}


def reuse(rig: Rig, keys: list[int], *, digests: int) -> None:
    """The replica says that it reused these blocks; so many proofs follow."""
    rig.feed.on_reused(keys)
    for _ in range(digests):
        rig.prove(rig.feed._last)


def test_who_reuses_what_it_never_told_of_is_not_trusted(rig: Rig) -> None:
    rig.snapshot(0, [])
    reuse(rig, [1, 2], digests=MUTE_DIGESTS)
    assert rig.view() is View.EXACT
    rig.prove(0)
    assert rig.view() is View.DEGRADED
    assert rig.lost == [0.0]
    assert rig.asked == 0
    rig.snapshot(0, [])
    assert rig.view() is View.DEGRADED


def test_a_replica_that_speaks_again_is_trusted_again(rig: Rig) -> None:
    rig.snapshot(0, [])
    reuse(rig, [1, 2], digests=MUTE_DIGESTS + 1)
    rig.feed.on_change(1, Stored(0, [7, 8]), 0.0)
    assert rig.view() is View.DEGRADED
    rig.feed.on_reused([7, 8])
    assert rig.view() is View.EXACT


def test_blocks_that_are_told_of_after_their_reuse_are_no_secret(rig: Rig) -> None:
    rig.snapshot(0, [])
    reuse(rig, [1, 2], digests=MUTE_DIGESTS)
    rig.feed.on_change(1, Stored(0, [1, 2]), 0.0)
    rig.feed.on_change(2, Removed([2, 1]), 0.0)
    for _ in range(5):
        rig.prove(2)
    assert rig.view() is View.EXACT


def test_a_replica_that_reuses_nothing_has_nothing_to_tell(rig: Rig) -> None:
    """A cache that is switched off, or prompts shorter than a block."""
    rig.snapshot(0, [])
    for _ in range(100):
        reuse(rig, [], digests=1)
    assert rig.view() is View.EXACT


def test_what_the_budget_dropped_was_told_of(live: Rig) -> None:
    live.tree._budget = 2 * BYTES_PER_KEY + BYTES_PER_RUN
    live.feed.on_change(11, Stored(3, [4]), 0.0)
    assert live.tree.is_partial(live.feed.number)
    live.feed.on_reused([1, 2, 3, 4])
    for _ in range(5):
        live.feed.on_digest(Digest(11, 4, 1 ^ 2 ^ 3 ^ 4), 0.0)
    assert live.view() is View.EXACT


def test_a_lost_view_keeps_what_is_booked_and_an_empty_cache_does_not(live: Rig) -> None:
    tree, number = live.tree, live.feed.number
    tree.mark(number, [1, 2, 3, 4, 5])
    live.prove(10, wrong=1)
    assert tree.reach([1, 2, 3, 4, 5]) == ({}, {})
    live.snapshot(10, CHAIN)
    assert tree.reach([1, 2, 3, 4, 5]) == ({number: 3}, {number: 5})
    live.feed.on_change(11, Cleared(), 0.0)
    assert tree.marked_count == 0


def test_a_feed_that_starts_over_unannounced_is_not_trusted_for_long(live: Rig) -> None:
    now = 0.0
    for sequence in range(1, 4):
        now += 5.1
        live.feed.on_change(sequence, Stored(0, [sequence + 20]), now)
        live.feed.on_digest(Digest(sequence, sequence, 0), now)
        live.feed.tick(now)
    assert live.view() is View.DEGRADED
    assert live.asked == 1
