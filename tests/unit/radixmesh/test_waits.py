"""Back-off: windows that double up to a limit, a random part of each, and a fresh start."""

import random

from hypothesis import given
from hypothesis import strategies as st

from radixmesh.waits import Backoff


class Highest(random.Random):
    """Always draws the upper end."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_windows_double_up_to_the_limit() -> None:
    backoff = Backoff(0.1, 5.0, Highest())
    waits = [round(backoff.next_s(), 3) for _ in range(9)]
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_a_good_connection_starts_it_over() -> None:
    backoff = Backoff(0.1, 5.0, Highest())
    for _ in range(6):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.1


@given(st.integers(), st.integers(1, 100))
def test_waits_stay_in_their_window_and_differ_between_routers(seed: int, tries: int) -> None:
    first = Backoff(0.1, 5.0, random.Random(seed))
    second = Backoff(0.1, 5.0, random.Random(seed + 1))
    waits = [(first.next_s(), second.next_s()) for _ in range(tries)]
    assert all(0 <= wait <= 5.0 for pair in waits for wait in pair)
    assert all(one != other for one, other in waits)


def test_a_thousand_failures_do_not_overflow() -> None:
    backoff = Backoff(0.1, 5.0, Highest())
    assert [backoff.next_s() for _ in range(5000)][-1] == 5.0
