"""Marks of bookings: counted for each booking, gone at Stored, at the end, or with the replica."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from router.tree.inflight import InFlight, Marks
from router.tree.predicted import Predicted

CHAIN = list(range(1, 13))
STEPS = st.lists(
    st.tuples(st.sampled_from(["book", "end", "stored", "forget"]), st.integers(0, 12)), max_size=60
)


@dataclass
class Booked:
    marks: Marks
    keys: set[int]


class Pair:
    """The marks, and what each live booking still has, given the same steps."""

    def __init__(self) -> None:
        self.inflight = InFlight()
        self.live: list[Booked] = []

    def do(self, kind: str, number: int) -> None:
        match kind:
            case "book":
                keys = CHAIN[: number or 1]
                self.live.append(Booked(self.inflight.mark(7, keys), set(keys)))
            case "end" if self.live:
                self.live.pop(number % len(self.live)).marks.release()
            case "stored":
                self.inflight.confirm(7, CHAIN[:number])
                self.drop(set(CHAIN[:number]))
            case "forget":
                self.inflight.forget(7)
                self.drop(set(CHAIN))

    def drop(self, keys: set[int]) -> None:
        for booked in self.live:
            booked.keys -= keys


@given(STEPS)
@settings(max_examples=200, deadline=None)
def test_marks_are_those_of_live_bookings_that_no_event_confirmed(
    steps: list[tuple[str, int]],
) -> None:
    pair = Pair()
    for kind, number in steps:
        pair.do(kind, number)
        expected = set().union(*(booked.keys for booked in pair.live))
        assert len(pair.inflight) == len(expected)
        if expected and len(expected) == max(expected) - min(expected) + 1:
            assert pair.inflight.depth(7, CHAIN, min(expected) - 1) == max(expected)
    for booked in pair.live:
        booked.marks.release()
    assert len(pair.inflight) == 0


def test_siblings_that_arrive_together_see_the_first_one() -> None:
    inflight = InFlight()
    first = inflight.mark(1, CHAIN)
    second = inflight.mark(1, CHAIN)
    assert inflight.depth(1, CHAIN, 0) == 12
    assert inflight.depth(2, CHAIN, 0) == 0
    first.release()
    assert inflight.depth(1, CHAIN, 0) == 12
    second.release()
    second.release()
    assert inflight.depth(1, CHAIN, 0) == 0


def test_marks_go_on_from_what_is_held() -> None:
    inflight = InFlight()
    inflight.mark(1, CHAIN[4:8])
    assert inflight.depth(1, CHAIN, 4) == 8
    inflight.confirm(1, CHAIN[4:6])
    assert inflight.depth(1, CHAIN, 6) == 8


def test_a_booking_that_ends_late_does_not_take_a_later_ones_mark() -> None:
    inflight = InFlight()
    first = inflight.mark(1, CHAIN)
    inflight.confirm(1, CHAIN)
    inflight.mark(1, CHAIN)
    first.release()
    assert inflight.depth(1, CHAIN, 0) == 12


def test_a_guess_expires() -> None:
    predicted = Predicted(ttl_s=10)
    predicted.learn(CHAIN, 0.0)
    predicted.learn(CHAIN[:5], 8.0)
    assert predicted.depth(CHAIN, 9.0) == 12
    assert predicted.depth(CHAIN, 11.0) == 5
    assert predicted.depth(CHAIN, 18.0) == 0


def test_guesses_are_bounded_and_lose_their_tips_first() -> None:
    predicted = Predicted(limit=20)
    predicted.learn(CHAIN, 0.0)
    predicted.learn(range(100, 112), 1.0)
    assert len(predicted) == 20
    assert predicted.depth(range(100, 112), 1.0) == 12
    assert predicted.depth(CHAIN, 1.0) == 8
