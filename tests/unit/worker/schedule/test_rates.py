"""What a replica learns of its own pace."""

import pytest

from worker.schedule.rates import Rates


def test_nothing_is_known_at_first() -> None:
    rates = Rates()
    assert (rates.prefill_rate, rates.decode_step_s) == (0.0, 0.0)


def test_a_steady_pace_is_learned_exactly() -> None:
    rates = Rates()
    for _ in range(20):
        rates.observe(prefill_tokens=0, decode_rows=4, seconds=0.02)
        rates.observe(prefill_tokens=100, decode_rows=4, seconds=0.12)
    assert rates.decode_step_s == pytest.approx(0.02)
    assert rates.prefill_rate == pytest.approx(1000)


def test_a_change_of_pace_is_followed() -> None:
    rates = Rates()
    rates.observe(prefill_tokens=100, decode_rows=0, seconds=1.0)
    for _ in range(50):
        rates.observe(prefill_tokens=100, decode_rows=0, seconds=0.1)
    assert rates.prefill_rate == pytest.approx(1000, rel=0.1)


def test_a_tiny_prefill_weighs_little() -> None:
    rates = Rates()
    rates.observe(prefill_tokens=1000, decode_rows=0, seconds=1.0)
    rates.observe(prefill_tokens=1, decode_rows=0, seconds=0.01)
    assert rates.prefill_rate == pytest.approx(1000, rel=0.05)


def test_an_empty_step_teaches_nothing() -> None:
    rates = Rates()
    rates.observe(prefill_tokens=0, decode_rows=0, seconds=5.0)
    assert (rates.prefill_rate, rates.decode_step_s) == (0.0, 0.0)


def test_a_prefill_step_shorter_than_a_decode_step_gives_no_endless_rate() -> None:
    rates = Rates()
    rates.observe(prefill_tokens=0, decode_rows=1, seconds=1.0)
    rates.observe(prefill_tokens=100, decode_rows=1, seconds=0.5)
    assert 0 < rates.prefill_rate <= 100 / 0.05


def test_a_few_ids_teach_no_rate() -> None:
    rates = Rates()
    rates.observe(prefill_tokens=1, decode_rows=0, seconds=0.003)
    assert rates.prefill_rate == 0.0
    for _ in range(63):
        rates.observe(prefill_tokens=1, decode_rows=0, seconds=0.003)
    assert rates.prefill_rate == pytest.approx(333, rel=0.01)
