"""Signs of life: what only a step of the ranks brings, and not that a front repeats itself."""

from dataclasses import replace

from router.fleet.pulse import Pulse
from router.fleet.workload import Report

BUSY = Report(running=3, waiting=2, uncached_tokens=900, free_blocks=50)


def begun() -> Pulse:
    pulse = Pulse()
    pulse.begin(100.0)
    return pulse


def test_silence_counts_from_the_last_sign_or_from_the_beginning_of_what_waits() -> None:
    pulse = begun()
    assert pulse.silent_s(since=90.0, now=130.0) == 30.0
    assert pulse.silent_s(since=120.0, now=130.0) == 10.0
    pulse.beat(128.0)
    assert pulse.silent_s(since=120.0, now=130.0) == 2.0


def test_a_load_that_is_said_again_is_no_sign_of_life() -> None:
    pulse = begun()
    pulse.hear(BUSY, 101.0)
    for second in range(102, 130):
        pulse.hear(replace(BUSY, seen_entry_id=second), float(second))
    assert pulse.silent_s(since=0.0, now=130.0) == 29.0


def test_a_load_that_changes_is_one() -> None:
    pulse = begun()
    for step in range(30):
        pulse.hear(replace(BUSY, uncached_tokens=900 - step), 101.0 + step)
    assert pulse.silent_s(since=0.0, now=131.0) == 1.0


def test_while_it_rests_nothing_is_held_against_it() -> None:
    pulse = begun()
    pulse.excuse(True, 110.0)
    assert pulse.silent_s(since=0.0, now=500.0) == 0.0
    pulse.excuse(False, 500.0)
    assert pulse.silent_s(since=0.0, now=507.0) == 7.0


def test_a_new_life_begins_with_a_sign() -> None:
    pulse = begun()
    pulse.excuse(True, 110.0)
    pulse.begin(200.0)
    assert pulse.silent_s(since=0.0, now=203.0) == 3.0
