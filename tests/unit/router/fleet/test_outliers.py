"""Outliers: a replica that answers late alone is left out; a fleet that is late is not."""

import heapq
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.fleet.breaker import BreakerLimits, Outcome
from router.fleet.fitness import Fitness, Stance
from router.fleet.outliers import OutlierLimits, Outliers, Seat

LIMITS = OutlierLimits()


def answer(seat: Seat, actual_s: float, now: float, predicted_s: float = 1.0) -> None:
    seat.on_sent(now).answered(predicted_s, actual_s, now)


def run(seats: list[Seat], seconds: dict[int, float], now: float = 0.0, rounds: int = 60) -> float:
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


@pytest.mark.parametrize("late_s", [1.0, 5.0, 10.0])
def test_a_burst_of_late_answers_is_not_enough(late_s: float) -> None:
    outliers, seats = seated(4)
    for start in range(0, 300, 20):
        now = run(seats, {0: 30.0}, start + 3.0, rounds=int(2 * late_s))
        run(seats, {}, now, rounds=int(2 * (20 - late_s)))
    assert outliers.ejected == 0


def test_few_answers_are_not_enough_however_long_they_take_to_come() -> None:
    outliers, seats = seated(4)
    for step in range(LIMITS.samples):
        assert outliers.ejected == 0
        for seat in seats:
            late_s = 6.0 if seat is seats[0] else 1.0
            answer(seat, late_s, step * LIMITS.span_s + late_s)
    run(seats[1:], {}, LIMITS.samples * LIMITS.span_s, rounds=10)
    assert outliers.ejected == 1


def test_only_requests_of_the_same_seconds_are_compared() -> None:
    outliers, seats = seated(4)
    for step in range(240):
        # All are late in busy moments; one is asked in them, the others in between.
        busy = step // 10 % 2 == 0
        for seat in seats[:1] if busy else seats[1:]:
            late_s = 9.0 if busy else 0.5
            answer(seat, late_s, step * 0.5 + late_s)
    assert outliers.ejected == 0


def test_seconds_without_siblings_tell_nothing_either_way() -> None:
    outliers, seats = seated(4)
    now = run(seats, {0: 4.0}, rounds=16)
    now = run(seats[:1], {0: 4.0}, now, rounds=20)
    assert outliers.ejected == 0
    run(seats, {0: 4.0}, now, rounds=16)
    assert outliers.ejected == 1


def test_among_replicas_that_differ_widely_the_last_is_no_outlier() -> None:
    outliers, seats = seated(4)
    run(seats, {0: 0.5, 1: 1.0, 2: 4.0, 3: 8.0})
    assert outliers.ejected == 0


def test_answers_of_long_ago_do_not_count() -> None:
    outliers, seats = seated(4)
    now = run(seats, {0: 8.0}, rounds=30)
    now = run(seats, {0: 8.0}, now + LIMITS.window_s, rounds=20)
    assert outliers.ejected == 0
    run(seats, {0: 8.0}, now, rounds=40)
    assert outliers.ejected == 1


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
    outliers, seats = seated(4, OutlierLimits(eject_s=5.0))
    now = 0.0
    while seats[2].gate.closed:
        now = run(seats, {2: 8.0}, now, rounds=1)
    now = run(seats, {2: 8.0}, now, rounds=9)
    assert not seats[2].allows(now)
    now = run(seats[:2] + seats[3:], {}, now, rounds=1)
    trial = seats[2].on_sent(now)
    assert not seats[2].allows(now)
    trial.answered(1.0, 1.2, now)
    assert outliers.ejected == 0
    run(seats, {2: 8.0}, now, rounds=10)
    assert outliers.ejected == 0, "what it did before is forgotten"


def test_a_probe_is_not_judged_by_one_sibling() -> None:
    outliers, seats = seated(3)
    now = run(seats, {2: 8.0})
    assert outliers.ejected == 1
    now = run(seats[:1], {}, now, rounds=120)
    seats[2].on_sent(now).answered(1.0, 8.0, now)
    assert outliers.ejected == 0


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


class Replay:
    """Answers in the order in which they come, to whoever is not left out."""

    def __init__(self, count: int) -> None:
        self.outliers, self.seats = seated(count)
        self.ejected_at: dict[int, float] = {}
        self._pending: list[tuple[float, int, float, float]] = []

    def send(self, number: int, at: float, predicted_s: float, actual_s: float) -> None:
        if self.seats[number].gate.closed:
            heapq.heappush(self._pending, (at + actual_s, number, predicted_s, actual_s))

    def go_on(self, now: float) -> None:
        while self._pending and self._pending[0][0] <= now:
            done, number, predicted_s, actual_s = heapq.heappop(self._pending)
            self.seats[number].answered(predicted_s, actual_s, done, probes=False)
            for late, seat in enumerate(self.seats):
                if not seat.gate.closed:
                    self.ejected_at.setdefault(late, done)


SEEDS = st.integers(0, 10_000)


@given(SEEDS, st.floats(0.2, 1.3), st.sampled_from([0.3, 1.0, 5.0]))
def test_a_fleet_that_is_only_loaded_leaves_nobody_out(
    seed: int, load: float, per_s: float
) -> None:
    """Queues of equal replicas, up to more load than they can take; predictions as ours are."""
    chance = random.Random(seed)
    fleet = Replay(5)
    # What each gets to do is more or less like what its rate was learned from.
    kinds = [chance.uniform(0.7, 1.4) for _ in fleet.seats]
    free_at = [0.0] * 5
    now = 0.0
    for _ in range(800):
        now += chance.expovariate(5 * load * per_s)
        fleet.go_on(now)
        number = min(chance.sample(range(5), 2), key=lambda one: free_at[one])
        work = chance.expovariate(per_s)
        wait = max(0.0, free_at[number] - now)
        guessed = wait * chance.uniform(0.5, 1.5) + work * chance.uniform(0.6, 1.2)
        free_at[number] = now + wait + work
        fleet.send(number, now, guessed * kinds[number], wait + work)
    assert not fleet.ejected_at


@given(SEEDS, st.integers(3, 6))
def test_bursts_that_hit_replicas_unevenly_leave_nobody_out(seed: int, count: int) -> None:
    """Up to ten seconds long; nothing of what they do to a replica was predicted."""
    chance = random.Random(seed)
    fleet = Replay(count)
    now, begins, ends = 0.0, chance.uniform(0, 20), 0.0
    hits = [0.1] * count
    while now < 120:
        now += chance.expovariate(30 if now < ends else 4)
        fleet.go_on(now)
        if now >= begins:
            ends = now + chance.uniform(0.5, 10)
            begins = ends + chance.uniform(10, 30)
            hits = [chance.choice((0.1, 0.3, 1.0, 3.0, 10.0)) for _ in range(count)]
        number = chance.randrange(count)
        usual_s = hits[number] if now < ends else 0.1
        fleet.send(number, now, 0.05, usual_s * chance.uniform(0.5, 1.5))
    assert not fleet.ejected_at


@given(SEEDS, st.integers(3, 8), st.floats(0.1, 20.0))
def test_a_fleet_with_guessed_rates_leaves_nobody_out(seed: int, count: int, off: float) -> None:
    """All rates are wrong by one factor, and each by its own besides."""
    chance = random.Random(seed)
    fleet = Replay(count)
    own = [off * chance.uniform(0.6, 1.6) for _ in range(count)]
    for step in range(60 * count):
        now, number = step / count, step % count
        fleet.go_on(now)
        fleet.send(number, now, 1.0, own[number] * chance.uniform(0.7, 1.4))
    assert not fleet.ejected_at


@given(SEEDS, st.integers(3, 8))
def test_a_cold_start_leaves_nobody_out(seed: int, count: int) -> None:
    """What a replica is asked in its first ten seconds waits until they are over."""
    chance = random.Random(seed)
    fleet = Replay(count)
    warm_at = [chance.choice((0.0, 10.0)) for _ in range(count)]
    for step in range(40 * count):
        now, number = step / count, step % count
        fleet.go_on(now)
        fleet.send(number, now, 0.1, max(0.0, warm_at[number] - now) + chance.uniform(0.1, 0.3))
    assert not fleet.ejected_at


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("per_s", [2, 10])
def test_a_replica_five_times_slower_than_it_says_is_found_in_half_a_minute(
    seed: int, per_s: int
) -> None:
    chance = random.Random(seed)
    fleet = Replay(5)
    for step in range(90 * 5 * per_s):
        now, number = step / (5 * per_s), step % 5
        fleet.go_on(now)
        slower = 5.0 if number == 3 and now > 40 else 1.0
        fleet.send(number, now, 1.0, slower * chance.uniform(0.7, 1.4))
    assert fleet.ejected_at.keys() == {3}
    assert 50 < fleet.ejected_at[3] < 75


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
