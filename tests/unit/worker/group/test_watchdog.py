"""A stuck step is noticed, an idle rank is left alone."""

import threading

import pytest

from worker.group.watchdog import Watchdog


def test_a_step_over_its_limit_is_reported() -> None:
    stuck = threading.Event()
    watchdog = Watchdog(0.05, on_stuck=stuck.set)
    watchdog.start()
    with watchdog.step():
        assert stuck.wait(5)
    watchdog.close()


def test_a_rank_between_steps_is_not_stuck() -> None:
    stuck = threading.Event()
    watchdog = Watchdog(0.05, on_stuck=stuck.set)
    watchdog.start()
    with watchdog.step():
        pass
    assert not stuck.wait(0.3)
    watchdog.close()


def test_what_is_no_part_of_a_step_is_not_counted_and_the_rest_of_the_step_is() -> None:
    stuck = threading.Event()
    watchdog = Watchdog(0.05, on_stuck=stuck.set)
    watchdog.start()
    with watchdog.step():
        with watchdog.paused():
            assert not stuck.wait(0.3)
        assert stuck.wait(5)
    watchdog.close()


def test_the_state_of_a_rank_that_is_stuck_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stuck = threading.Event()
    watchdog = Watchdog(0.05, state=["step", 7], on_stuck=stuck.set)
    watchdog.start()
    with watchdog.step():
        assert stuck.wait(5)
    watchdog.close()
    [record] = [vars(each) for each in caplog.records if each.msg == "step is stuck"]
    assert record["state"] == "['step', 7]"
