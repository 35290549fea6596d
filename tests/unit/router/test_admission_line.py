"""Who goes next, and that nobody waits for ever."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.edge.line import PASSED_LIMIT, Line
from router.edge.outflow import SAMPLES, UNKNOWN_S, Outflow


@dataclass(eq=False)
class One:
    priority: int = 0
    number: int = 0


def line_of(*priorities: int) -> tuple[Line[One], list[One]]:
    line: Line[One] = Line()
    waiters = [One(priority, number) for number, priority in enumerate(priorities)]
    for waiter in waiters:
        line.add(waiter)
    return line, waiters


def test_higher_classes_go_first_and_each_in_order() -> None:
    line, _ = line_of(0, 5, 0, -5, 5)
    assert [line.pop().number for _ in range(5)] == [1, 4, 0, 2, 3]
    assert line.head() is None
    with pytest.raises(LookupError):
        line.pop()


def test_after_seven_who_passed_it_the_oldest_is_the_head_and_stays_it() -> None:
    line, (low, *_) = line_of(-1, *[1] * 20)
    assert [line.pop().number for _ in range(PASSED_LIMIT)] == list(range(1, PASSED_LIMIT + 1))
    line.add(One(100))
    assert line.head() is low
    assert line.pop() is low
    head = line.head()
    assert head is not None
    assert head.priority == 100


def test_one_who_gave_up_is_not_waited_for() -> None:
    line, (first, second) = line_of(3, 0)
    line.remove(first)
    assert first not in line
    assert line.pop() is second
    with pytest.raises(KeyError):
        line.remove(first)


Act = tuple[str, int]
ACTS = st.one_of(
    st.tuples(st.just("add"), st.integers(-3, 3)),
    st.tuples(st.just("pop"), st.just(0)),
    st.tuples(st.just("remove"), st.integers(0, 30)),
)


@given(st.lists(ACTS, max_size=150))
def test_order_within_a_class_holds_and_every_wait_is_bounded(acts: list[Act]) -> None:
    line: Line[One] = Line()
    waiting: list[One] = []
    bounds: dict[One, int] = {}
    departures = 0
    for act, value in acts:
        if act == "add":
            one = One(value)
            bounds[one] = departures + (PASSED_LIMIT + 1) * (len(waiting) + 1)
            waiting.append(one)
            line.add(one)
        elif act == "remove" and waiting:
            line.remove(waiting.pop(value % len(waiting)))
        elif act == "pop" and waiting:
            gone = line.pop()
            departures += 1
            same = [one for one in waiting if one.priority == gone.priority]
            assert gone is same[0]
            assert departures <= bounds[gone]
            waiting.remove(gone)
        assert len(line) == len(waiting)
        assert all(departures < bounds[one] for one in waiting)


def test_a_rate_is_what_left_since_the_line_formed() -> None:
    outflow = Outflow()
    outflow.note(1000, 0.5)
    outflow.begin(10.0)
    assert outflow.seconds_for(3, 10.0) == UNKNOWN_S
    outflow.note(2, 11.0)
    outflow.note(2, 12.0)
    assert outflow.seconds_for(6, 12.0) == pytest.approx(3.0)
    # Nothing more comes: the longer, the slower.
    assert outflow.seconds_for(6, 14.0) == pytest.approx(6.0)


def test_while_nothing_leaves_the_hint_grows() -> None:
    outflow = Outflow()
    outflow.begin(0.0)
    assert outflow.seconds_for(1, 25.0) == 25.0


def test_an_old_rate_is_forgotten() -> None:
    outflow = Outflow()
    outflow.begin(0.0)
    for second in range(100):
        outflow.note(1, float(second))
    for tenth in range(1, SAMPLES + 2):
        outflow.note(1, 99 + tenth / 10)
    assert outflow.seconds_for(10, 99 + (SAMPLES + 1) / 10) == pytest.approx(1.0)
