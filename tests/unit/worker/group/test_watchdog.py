"""A stuck step is noticed, an idle rank is left alone."""

import threading

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
