"""Outliers: a replica that answers late alone is left out; a fleet that is late is not."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.breaker import BreakerLimits, Outcome
from router.fleet.fitness import Fitness, Stance
from router.fleet.outliers import OutlierLimits, Outliers, Seat

LIMITS = OutlierLimits()


def answer(seat: Seat, actual_s: float, now: float, predicted_s: float = 1.0) -> None:
    seat.on_sent(now).answered(predicted_s, actual_s, now)


def run(seats: list[Seat], seconds: dict[int, float], now: float = 0.0, rounds: int = 20) -> float:
    """Every seat answers, by default in the second that was predicted; return the time after."""
    for _ in range(rounds):
        now += 0.5
        for number, seat in enumerate(seats):
            if seat.allows(now):
                answer(seat, seconds.get(number, 1.0), now)
    return now


def seated(count: int, limits: OutlierLimits = LIMITS) -> tuple[Outliers, list[Seat]]:
    outliers = Outliers(limits)
    return outliers, [outliers.join() for _ in range(count)]


def test_one_that_is_late_alone_is_left_out_and_says_why() -> None:
    outliers, seats = seated(4)
    now = run(seats, {2: 8.0})
    assert [seat.gate.closed for seat in seats] == [True, True, False, True]
    assert not seats[2].allows(now)
    assert seats[2].reason(now).startswith("it answers much later than its siblings; tried again")
    assert outliers.ejected == 1


@pytest.mark.parametrize("factor", [0.1, 3.0, 50.0])
def test_a_fleet_that_is_late_as_a_whole_leaves_nobody_out(factor: float) -> None:
    outliers, seats = seated(6)
    run(seats, dict.fromkeys(range(6), factor))
    assert outliers.ejected == 0


def test_milliseconds_are_no_lateness() -> None:
    outliers, seats = seated(4)
    for step in range(40):
        for number, seat in enumerate(seats):
            answer(seat, 0.2 if number == 1 else 0.01, step * 0.5, predicted_s=0.01)
    assert outliers.ejected == 0


def test_a_few_late_answers_are_not_enough() -> None:
    outliers, seats = seated(4)
    now = run(seats, {})
    for _ in range(LIMITS.samples):
        answer(seats[0], 30.0, now)
    assert outliers.ejected == 0, "its median is what it was"
    fresh = outliers.join()
    for _ in range(LIMITS.samples - 1):
        answer(fresh, 30.0, now)
    assert outliers.ejected == 0, "it has too few answers"
    answer(fresh, 30.0, now)
    assert outliers.ejected == 1


def test_nobody_is_judged_without_siblings_to_compare_with() -> None:
    outliers, seats = seated(4)
    for step in range(40):
        answer(seats[0], 50.0, step * 0.5)
        answer(seats[1], 1.0, step * 0.5)
    assert outliers.ejected == 0


def test_answers_of_long_ago_do_not_count() -> None:
    outliers, seats = seated(4)
    now = run(seats, {})
    for _ in range(LIMITS.samples):
        answer(seats[3], 50.0, now + LIMITS.window_s + 1)
    assert outliers.ejected == 0, "its siblings have said nothing lately"


@pytest.mark.parametrize(("count", "most"), [(1, 0), (2, 0), (3, 1), (4, 1), (6, 2), (9, 3)])
def test_no_more_than_a_third_is_left_out_at_once(count: int, most: int) -> None:
    outliers, seats = seated(count)
    late = dict.fromkeys(range(max(1, count // 2)), 20.0)
    now = 0.0
    for _ in range(10):
        now = run(seats, late, now)
        assert outliers.ejected <= most
    assert count < 6 or outliers.ejected > 0


def test_one_request_tries_it_again_and_a_good_answer_takes_it_back() -> None:
    outliers, seats = seated(4)
    now = run(seats, {2: 8.0})
    now = run(seats, {2: 8.0}, now, rounds=80)
    assert not seats[2].gate.closed
    while not seats[2].allows(now):
        now = run(seats[:2] + seats[3:], {}, now, rounds=1)
    trial = seats[2].on_sent(now)
    assert not seats[2].allows(now)
    trial.answered(1.0, 1.2, now)
    assert outliers.ejected == 0
    answer(seats[2], 8.0, now)
    assert outliers.ejected == 0, "what it did before is forgotten"


def test_a_late_probe_leaves_it_out_for_twice_as_long_and_a_lost_one_is_sent_again() -> None:
    _, seats = seated(4)
    now = run(seats, {2: 8.0})
    while not seats[2].allows(now):
        now = run(seats[:2] + seats[3:], {}, now, rounds=1)
    seats[2].on_sent(now).free()
    assert seats[2].allows(now)
    seats[2].on_sent(now).answered(1.0, 9.0, now)
    assert seats[2].gate.opens_in(now) == pytest.approx(60.0)
    now += 60.0
    seats[2].on_sent(now).failed(now)
    assert seats[2].gate.opens_in(now) == pytest.approx(120.0)


def test_who_leaves_is_counted_no_more() -> None:
    outliers, seats = seated(4)
    run(seats, {2: 8.0})
    seats[2].leave()
    seats[2].leave()
    assert (len(outliers), outliers.ejected) == (3, 0)


@given(st.integers(0, 10_000), st.floats(0.2, 1.3))
def test_a_fleet_that_is_only_loaded_leaves_nobody_out(seed: int, load: float) -> None:
    """Queues of equal replicas, up to more load than they can take; predictions as ours are."""
    chance = random.Random(seed)
    outliers, seats = seated(5)
    # What each gets to do is more or less like what its rate was learned from.
    kinds = [chance.uniform(0.7, 1.4) for _ in seats]
    free_at = [0.0] * len(seats)
    pending: list[tuple[float, int, float, float]] = []
    now = 0.0
    for _ in range(400):
        now += chance.expovariate(len(seats) * load)
        for done, number, predicted, sent in sorted(p for p in pending if p[0] <= now):
            answer(seats[number], done - sent, done, predicted)
        pending = [each for each in pending if each[0] > now]
        number = min(chance.sample(range(len(seats)), 2), key=lambda one: free_at[one])
        work = chance.expovariate(1.0)
        wait = max(0.0, free_at[number] - now)
        guessed = (wait * chance.uniform(0.5, 1.5) + work * chance.uniform(0.6, 1.2)) * kinds[
            number
        ]
        free_at[number] = now + wait + work
        pending.append((free_at[number], number, guessed, now))
    assert outliers.ejected == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_replica_five_times_slower_than_it_says_is_found_under_load(seed: int) -> None:
    chance = random.Random(seed)
    outliers, seats = seated(5)
    sent: Counter[int] = Counter()
    for step in range(300):
        number = step % 5
        if seats[number].allows(step * 0.2):
            sent[number] += 1
            late = 5.0 if number == 3 else 1.0
            answer(seats[number], late * chance.uniform(0.6, 1.6), step * 0.2)
    assert not seats[3].gate.closed
    assert outliers.ejected == 1
    assert sent[3] < 30


def test_a_fitness_is_both_judges_and_says_what_speaks_against_a_replica() -> None:
    outliers = Outliers(LIMITS)
    fits = [Fitness(BreakerLimits(failures=2), outliers) for _ in range(3)]
    for step in range(20):
        for number, fit in enumerate(fits):
            stay = fit.on_sent(predicted_s=1.0, now=step)
            stay.note(Outcome.BEGAN, step + (9.0 if number == 0 else 1.0))
            stay.note(Outcome.FINISHED, step + 10.0)
    assert [fit.stance(30.0) for fit in fits] == [Stance.EJECTED, Stance.FIT, Stance.FIT]
    assert not fits[0].allows(30.0)
    for _ in range(2):
        fits[1].on_sent(predicted_s=1.0, now=30.0).note(Outcome.FAILED, 31.0)
    assert [fit.stance(32.0) for fit in fits] == [Stance.EJECTED, Stance.OPEN, Stance.FIT]
    assert fits[1].reason(32.0)
    assert fits[2].reason(32.0) == ""
    assert fits[1].stance(41.0) is Stance.HALF_OPEN
    assert fits[0].stance(90.0) is Stance.RETRIED
    assert [fit.clear for fit in fits] == [False, False, True]
    assert fits[2].suffered_at() < fits[1].suffered_at()
    fits[0].leave()
    assert len(outliers) == 2


def test_a_probe_of_both_judges_at_once_answers_to_both() -> None:
    outliers = Outliers(LIMITS)
    fits = [Fitness(BreakerLimits(failures=1, open_s=100.0), outliers) for _ in range(3)]
    for step in range(20):
        for number, fit in enumerate(fits):
            stay = fit.on_sent(predicted_s=1.0, now=step)
            stay.note(Outcome.BEGAN, step + (9.0 if number == 0 else 1.0))
    assert not fits[0].seat.gate.closed
    fits[0].on_sent(predicted_s=1.0, now=30.0).note(Outcome.FAILED, 30.0)
    assert not fits[0].breaker.gate.closed
    assert not fits[0].allows(129.0)
    stay = fits[0].on_sent(predicted_s=1.0, now=131.0)
    assert not fits[0].allows(131.0)
    stay.note(Outcome.BEGAN, 132.0)
    assert fits[0].clear
