"""Booked prefixes in the match: counted for each booking, gone when stored, ended or cleared."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.tree.marks import Marks
from router.tree.meta_tree import MetaTree

PROMPTS = [list(range(1, 11)), [1, 2, 3, 4, *range(20, 26)], list(range(30, 36))]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["book"] * 3 + ["end", "store", "store", "evict", "lose", "clear"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 9),
    ),
    max_size=60,
)


@dataclass(eq=False)
class Booked:
    replica: int
    marks: Marks
    keys: set[int]


class Pair:
    """The tree, and what each replica holds and each live booking still waits for."""

    def __init__(self) -> None:
        self.tree = MetaTree()
        self.replicas = [self.tree.join() for _ in range(3)]
        self.held: dict[int, set[int]] = {replica: set() for replica in self.replicas}
        self.booked: list[Booked] = []

    def do(self, kind: str, index: int, prompt: int, number: int) -> None:
        replica, keys = self.replicas[index], PROMPTS[prompt][: number + 1]
        held = self.held[replica]
        depth = self.depth(replica, keys)
        match kind:
            case "book":
                self.booked.append(
                    Booked(replica, self.tree.mark(replica, keys), set(keys[depth:]))
                )
            case "end" if self.booked:
                booked = self.booked.pop(number % len(self.booked))
                booked.marks.release()
                booked.marks.release()
            case "store":
                self.tree.store(replica, keys[depth - 1] if depth else 0, keys[depth:])
                held.update(keys)
                self.drop(replica, set(keys))
            case "evict" if len(held) and depth == len(keys):
                children = [other for other in PROMPTS if other[: len(keys)] == keys]
                if not any(set(other[len(keys) : len(keys) + 1]) & held for other in children):
                    self.tree.remove(replica, [keys[-1]])
                    held.discard(keys[-1])
            case "lose":
                self.tree.clear(replica, keep_marks=True)
                held.clear()
            case "clear":
                self.tree.clear(replica)
                held.clear()
                self.drop(replica, {key for keys in PROMPTS for key in keys})

    def drop(self, replica: int, keys: set[int]) -> None:
        for booked in self.booked:
            if booked.replica == replica:
                booked.keys -= keys

    def depth(self, replica: int, keys: list[int]) -> int:
        return leading(keys, self.held[replica])

    def marked(self, replica: int) -> set[int]:
        return set().union(*(one.keys for one in self.booked if one.replica == replica))


def leading(keys: list[int], known: set[int]) -> int:
    return next((index for index, key in enumerate(keys) if key not in known), len(keys))


@given(STEPS)
@settings(max_examples=300, deadline=None)
def test_reach_is_what_is_held_and_then_what_is_booked(
    steps: list[tuple[str, int, int, int]],
) -> None:
    pair = Pair()
    for step in steps:
        pair.do(*step)
        assert pair.tree.marked_count == sum(len(pair.marked(each)) for each in pair.replicas)
        for prompt in PROMPTS:
            check(pair, prompt)
    for booked in pair.booked:
        booked.marks.release()
    assert pair.tree.marked_count == 0
    assert pair.tree._marks.masks == {}


def check(pair: Pair, prompt: list[int]) -> None:
    held, soon = pair.tree.reach(prompt)
    assert held == pair.tree.match(prompt)
    for replica in pair.replicas:
        depth, marked = pair.depth(replica, prompt), pair.marked(replica)
        assert held.get(replica, 0) == depth
        known = pair.held[replica] | marked
        if known.isdisjoint(prompt[leading(prompt, known) :]):  # nothing is booked behind a hole
            expected = leading(prompt, known)
            assert soon.get(replica, depth) == expected
        assert replica not in soon or soon[replica] > depth


def test_siblings_that_arrive_together_see_the_first_one() -> None:
    tree = MetaTree()
    replica, chain = tree.join(), list(range(1, 13))
    bookings = [tree.mark(replica, chain) for _ in range(16)]
    for booking in bookings[:-1]:
        booking.release()
        assert tree.reach(chain) == ({}, {replica: 12})
    bookings[-1].release()
    assert tree.reach(chain) == ({}, {})


def test_a_booking_that_ends_late_does_not_take_a_later_ones_mark() -> None:
    tree = MetaTree()
    replica, chain = tree.join(), list(range(1, 5))
    early = tree.mark(replica, chain)
    tree.store(replica, 0, chain)
    tree.remove(replica, chain[::-1])
    tree.mark(replica, chain)
    early.release()
    assert tree.reach(chain) == ({}, {replica: 4})


def test_what_is_held_is_not_marked_and_what_is_stored_no_more() -> None:
    tree = MetaTree()
    replica, chain = tree.join(), list(range(1, 13))
    tree.store(replica, 0, chain[:4])
    tree.mark(replica, chain)
    assert tree.marked_count == 8
    assert tree.reach(chain) == ({replica: 4}, {replica: 12})
    tree.store_pairs(replica, chain[4:10], chain[3:9])
    assert tree.marked_count == 2


@pytest.mark.parametrize("end", ["clear", "leave"])
def test_marks_go_with_the_replica(end: str) -> None:
    tree = MetaTree()
    replica = tree.join()
    marks = tree.mark(replica, [1, 2])
    getattr(tree, end)(replica)
    assert tree.marked_count == 0
    other = tree.join()
    tree.mark(other, [1, 2])
    marks.release()
    assert tree.reach([1, 2]) == ({}, {other: 2})
