"""The breaker: what counts, when it opens, and that one request alone tries a replica again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.errors import BY_REASON
from router.fleet.breaker import Breaker, BreakerLimits, Outcome, Permit, outcome_of
from router.gates import State

LIMITS = BreakerLimits(failures=3, open_s=10.0, most_open_s=35.0)


def fail(breaker: Breaker, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        breaker.on_sent(now).note(Outcome.FAILED, now)


@pytest.fixture
def breaker() -> Breaker:
    return Breaker(LIMITS)


@pytest.fixture
def opened(breaker: Breaker) -> Breaker:
    """Opened at 0."""
    fail(breaker, 3)
    return breaker


def test_only_what_speaks_of_the_replica_counts() -> None:
    faults = {reason for reason in BY_REASON if outcome_of(reason) is Outcome.FAILED}
    assert faults == {"GROUP_LOST", "RANK_DESYNC", "INTERNAL"}


def test_it_opens_after_failures_in_a_row(breaker: Breaker) -> None:
    fail(breaker, 2)
    assert breaker.allows(0.0)
    assert breaker.reason(0.0) == ""
    fail(breaker, 1)
    assert not breaker.allows(0.0)
    assert breaker.reason(4.0) == "it failed 3 times in a row; tried again in 6 s"


def test_a_finished_output_between_them_starts_the_count_anew(breaker: Breaker) -> None:
    for _ in range(10):
        fail(breaker, 2)
        breaker.on_sent(0.0).note(Outcome.FINISHED, 0.0)
    assert breaker.allows(0.0)


def test_first_ids_alone_do_not(breaker: Breaker) -> None:
    for _ in range(3):
        permit = breaker.on_sent(0.0)
        permit.note(Outcome.BEGAN, 0.0)
        permit.note(Outcome.FAILED, 0.0)
    assert not breaker.allows(0.0)


@pytest.mark.parametrize("times", [1, 100])
def test_what_says_nothing_opens_nothing_and_forgives_nothing(breaker: Breaker, times: int) -> None:
    fail(breaker, 2)
    for _ in range(times):
        breaker.on_sent(0.0).note(Outcome.NOTHING, 0.0)
    assert breaker.allows(0.0)
    fail(breaker, 1)
    assert not breaker.allows(0.0)


def test_half_open_lets_exactly_one_pass(opened: Breaker) -> None:
    assert not opened.allows(9.9)
    assert opened.gate.state(9.9) is State.OPEN
    assert opened.allows(10.0)
    assert opened.gate.state(10.0) is State.HALF_OPEN
    opened.on_sent(10.0)
    assert not opened.allows(10.0)
    assert not opened.allows(1000.0)
    assert opened.reason(10.0) == "it failed; one request tries it"


@pytest.mark.parametrize("sign", [Outcome.BEGAN, Outcome.FINISHED])
def test_a_probe_that_is_answered_closes_it(opened: Breaker, sign: Outcome) -> None:
    opened.on_sent(11.0).note(sign, 11.0)
    assert opened.gate.state(11.0) is State.CLOSED
    assert opened.allows(11.0)


def test_after_first_ids_it_is_on_trial_until_an_output_ends_well(opened: Breaker) -> None:
    permit = opened.on_sent(11.0)
    permit.note(Outcome.BEGAN, 11.0)
    fail(opened, 1, 12.0)
    assert not opened.allows(12.0)
    opened.on_sent(40.0).note(Outcome.FINISHED, 40.0)
    fail(opened, 2, 41.0)
    assert opened.allows(41.0)


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_limit(opened: Breaker) -> None:
    now, waits = 10.0, []
    for _ in range(4):
        fail(opened, 1, now)
        waits.append(opened.gate.opens_in(now))
        now += waits[-1]
    assert waits == [20.0, 35.0, 35.0, 35.0]
    opened.on_sent(now).note(Outcome.FINISHED, now)
    fail(opened, 3, now)
    assert opened.gate.opens_in(now) == 10.0


def test_a_probe_that_leaves_makes_room_for_another(opened: Breaker) -> None:
    permit = opened.on_sent(10.0)
    permit.note(Outcome.NOTHING, 10.0)
    assert opened.allows(10.0)
    other = opened.on_sent(10.0)
    permit.note(Outcome.NOTHING, 10.0)
    assert not opened.allows(10.0), "the first permit gives nothing back twice"
    other.note(Outcome.FINISHED, 10.0)
    assert opened.allows(10.0)


def test_requests_of_before_it_opened_say_nothing_new(breaker: Breaker) -> None:
    old = [breaker.on_sent(0.0) for _ in range(3)]
    fail(breaker, 3)
    probe = breaker.on_sent(10.0)
    old[0].note(Outcome.FAILED, 10.0)
    old[1].note(Outcome.FINISHED, 10.0)
    old[2].note(Outcome.NOTHING, 10.0)
    assert breaker.gate.opens_in(9.0) == 1.0
    assert not breaker.allows(10.0)
    probe.note(Outcome.FINISHED, 10.0)
    assert breaker.allows(10.0)


def test_a_request_sent_for_want_of_another_place_may_only_close_it(opened: Breaker) -> None:
    fail(opened, 20, 1.0)
    assert opened.gate.opens_in(1.0) == 9.0
    assert opened.failed_at == 1.0
    opened.on_sent(1.0).note(Outcome.FINISHED, 1.0)
    assert opened.allows(1.0)


def test_without_a_limit_it_never_opens() -> None:
    breaker = Breaker(BreakerLimits(failures=0))
    fail(breaker, 1000)
    assert breaker.allows(0.0)


EVENTS = st.lists(
    st.tuples(st.floats(0, 8), st.integers(0, 5), st.sampled_from(Outcome)), max_size=60
)


@given(EVENTS)
def test_of_those_who_wait_for_leave_never_two_try_a_replica_at_once(
    events: list[tuple[float, int, Outcome]],
) -> None:
    breaker, now = Breaker(LIMITS), 0.0
    under_way: list[tuple[Permit, int, bool]] = []
    for pause, which, outcome in events:
        now += pause
        probing = not breaker.gate.closed
        if which == 0 and breaker.allows(now):
            under_way.append((breaker.on_sent(now), breaker.gate.trips, probing))
        elif under_way:
            each = under_way[which % len(under_way)]
            each[0].note(outcome, now)
            if outcome is not Outcome.BEGAN:
                under_way.remove(each)
        present = [probe for _, trips, probe in under_way if probe and trips == breaker.gate.trips]
        if not breaker.gate.closed:
            assert len(present) <= 1
            assert breaker.allows(now) == (not present and not breaker.gate.opens_in(now))
        else:
            assert breaker.allows(now)


@given(EVENTS)
def test_whatever_happened_it_can_come_back(events: list[tuple[float, int, Outcome]]) -> None:
    breaker, now = Breaker(LIMITS), 0.0
    under_way: list[Permit] = []
    for pause, which, outcome in events:
        now += pause
        if which < 3:
            under_way.append(breaker.on_sent(now))
        elif under_way:
            under_way.pop(which % len(under_way)).note(outcome, now)
    for permit in under_way:
        permit.note(Outcome.NOTHING, now)
    now += LIMITS.most_open_s
    assert breaker.allows(now)
    breaker.on_sent(now).note(Outcome.FINISHED, now)
    assert breaker.gate.closed
