"""What a replica learns of its own pace."""

import math
import random
from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


RATE, FIXED_S, DECODE_S = 8000.0, 0.005, 0.02

Sizes = Callable[[random.Random], float]
SHORT: Sizes = lambda chance: chance.uniform(8, 64)  # noqa: E731
MIXED: Sizes = lambda chance: chance.expovariate(1 / 200) + 4  # noqa: E731
LONG: Sizes = lambda chance: chance.uniform(256, 512)  # noqa: E731


def learn(
    rates: Rates,
    sizes: Sizes,
    *,
    seed: int = 0,
    steps: int = 200,
    slower: float = 1.0,
    noise: float = 0.0,
    odd: float = 0.0,
) -> Rates:
    """Steps of one machine, every other one with decodes; some take ten times as long."""
    chance = random.Random(seed)
    for number in range(steps):
        rows = 4 * (number % 2)
        ids = 0 if number % 10 == 9 else int(sizes(chance))
        seconds = slower * ((DECODE_S if rows else FIXED_S) + ids / RATE)
        seconds *= chance.lognormvariate(0, noise) * (10 if chance.random() < odd else 1)
        rates.observe(prefill_tokens=ids, decode_rows=rows, seconds=seconds)
    return rates


@pytest.mark.parametrize("sizes", [SHORT, MIXED, LONG])
def test_the_rate_is_the_machines_however_long_its_prefills_are(sizes: Sizes) -> None:
    assert learn(Rates(), sizes).prefill_rate == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize("sizes", [SHORT, MIXED, LONG])
def test_noise_and_odd_steps_upset_no_rate(sizes: Sizes) -> None:
    noisy = [learn(Rates(), sizes, seed=seed, noise=0.1, odd=0.02) for seed in range(30)]
    assert median(each.prefill_rate for each in noisy) == pytest.approx(RATE, rel=0.15)
    assert all(0.6 * RATE < each.prefill_rate < 1.6 * RATE for each in noisy)
    assert median(each.decode_step_s for each in noisy) == pytest.approx(DECODE_S, rel=0.1)


@pytest.mark.parametrize("decode_rows", [0, 4])
def test_one_odd_step_changes_little(decode_rows: int) -> None:
    rates = learn(Rates(), MIXED)
    rates.observe(prefill_tokens=400, decode_rows=decode_rows, seconds=10 * (0.02 + 400 / RATE))
    rates.observe(prefill_tokens=0, decode_rows=4, seconds=10 * DECODE_S)
    assert rates.prefill_rate == pytest.approx(RATE, rel=0.15)
    assert rates.decode_step_s == pytest.approx(DECODE_S, rel=0.15)


@pytest.mark.parametrize("slower", [0.2, 5.0])
def test_a_machine_that_changes_is_followed(slower: float) -> None:
    rates = learn(learn(Rates(), MIXED), MIXED, slower=slower, steps=400)
    assert rates.prefill_rate == pytest.approx(RATE / slower, rel=0.1)
    assert rates.decode_step_s == pytest.approx(DECODE_S * slower, rel=0.1)


def test_prefills_that_are_all_alike_tell_no_more_than_ids_over_seconds() -> None:
    rates = learn(Rates(), lambda _: 100)
    alone, beside = 100 / (FIXED_S + 100 / RATE), RATE
    assert alone < rates.prefill_rate < beside


@given(
    st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 500), st.floats(1e-6, 100.0)), max_size=100
    )
)
def test_no_steps_make_a_rate_that_is_none(steps: list[tuple[int, int, float]]) -> None:
    rates = Rates()
    for ids, rows, seconds in steps:
        rates.observe(prefill_tokens=ids, decode_rows=rows, seconds=seconds)
        assert 0 <= rates.prefill_rate < math.inf
        assert 0 <= rates.decode_step_s <= 100
    assert (rates.prefill_rate > 0) == (sum(ids for ids, _, _ in steps) >= 64)
