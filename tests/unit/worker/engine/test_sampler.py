"""The sampler against naive restatements of what it draws from.

Run: pytest tests/unit/worker/engine/test_sampler.py
"""

import math
import random
from array import array
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.engine import Row
from worker.engine.sampler import draw, probabilities, uniform
from worker.request import Sampling


def row(
    sampling: Sampling | None = None, *, position: int = 0, banned: tuple[int, ...] = ()
) -> Row:
    return Row(1, array("I", [0]), 0, [0], True, position, sampling or Sampling(seed=1), banned)


def oracle(logits: list[float], sampling: Sampling) -> list[float]:
    """Temperature, top-k, top-p, min-p in plain Python; ties with the last kept are kept."""
    top = max(logits)
    weights = [math.exp((value - top) / sampling.temperature) for value in logits]
    total = sum(weights)
    probs = [weight / total for weight in weights]
    floor = max(probs) * sampling.min_p
    ordered = sorted(probs, reverse=True)
    if 0 < sampling.top_k < len(probs):
        floor = max(floor, ordered[sampling.top_k - 1])
        ordered = [p for p in ordered if p >= ordered[sampling.top_k - 1]]
    if sampling.top_p < 1:
        reached, wanted = 0.0, sampling.top_p * sum(ordered)
        for p in ordered:
            reached += p
            if reached >= wanted:
                floor = max(floor, p)
                break
    return [p if p >= floor else 0.0 for p in probs]


def chi_square(drawn: Counter[int], probs: list[float]) -> float:
    """Return Pearson's statistic over its degrees of freedom; near 1 when all is well."""
    count, mass = drawn.total(), sum(probs)
    used = [(drawn[i], count * p / mass) for i, p in enumerate(probs) if p > 0]
    return sum((o - e) ** 2 / e for o, e in used) / (len(used) - 1)


LOGITS = [2.0, 1.5, 1.0, 0.9, 0.4, 0.1, -0.5, -1.0, -1.2, -2.0, 1.9, 0.0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3),
        Sampling(seed=4, temperature=0.5),
        Sampling(seed=5, temperature=2.5),
        Sampling(seed=6, top_p=0.7),
        Sampling(seed=7, top_k=4),
        Sampling(seed=8, min_p=0.3),
        Sampling(seed=9, temperature=1.5, top_k=8, top_p=0.8, min_p=0.1),
    ],
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    count = 8000
    rows = [row(sampling, position=position) for position in range(count)]
    drawn = Counter(draw(torch.tensor([LOGITS]).expand(count, -1), rows).ids)
    probs = oracle(LOGITS, sampling)
    assert not [token for token in drawn if probs[token] == 0]
    assert chi_square(drawn, probs) < 2.5


@pytest.mark.parametrize("by", ["seed", "choice", "position"])
def test_neighbouring_keys_draw_independently(by: str) -> None:
    def number(index: int) -> float:
        key = {"seed": 5, "choice": 0, "position": 0} | {by: index}
        return uniform(key["seed"], key["choice"], key["position"])

    numbers = [number(index) for index in range(4000)]
    cells = Counter(
        4 * int(a * 4) + int(b * 4) for a, b in zip(numbers[::2], numbers[1::2], strict=True)
    )
    assert chi_square(cells, [1.0] * 16) < 2.5
    assert all(0 <= value < 1 for value in numbers)


def test_a_key_gives_the_same_number_in_every_release() -> None:
    assert uniform(1, 2, 3) == 0.6527702009682942


def test_every_bit_of_a_seed_counts() -> None:
    seeds = [0, 1, 1 << 32, 1 << 63, (1 << 63) + 1, (1 << 64) - 2, (1 << 64) - 1]
    assert len({uniform(seed, 0, 0) for seed in seeds}) == len(seeds)
    assert uniform(-1, 0, 0) == uniform((1 << 64) - 1, 0, 0)


# Logits on a coarse grid, so that ties happen, but no boundary within rounding.
grids = st.lists(st.integers(-12, 12).map(lambda n: n / 2), min_size=1, max_size=40)
samplings = st.builds(
    Sampling,
    seed=st.just(0),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([0.0, 0.137, 0.513, 0.9017, 1.0]),
    top_k=st.integers(0, 45),
    min_p=st.sampled_from([0.0, 0.0713, 0.507, 1.0]),
)


@settings(deadline=None, max_examples=300)
@given(grids, samplings)
def test_what_is_kept_equals_the_naive_oracle(logits: list[float], sampling: Sampling) -> None:
    given_ = probabilities(torch.tensor([logits]), [row(sampling)])[0].tolist()
    expected = oracle(logits, sampling)
    assert given_ == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=0, top_p=0.9),
        Sampling(seed=0, top_k=1500),
        Sampling(seed=0, top_k=1024, top_p=0.97),
        Sampling(seed=0, top_k=50),
    ],
)
@pytest.mark.parametrize("width", [0.0, 0.3, 6.0])
def test_a_large_vocabulary_keeps_the_same(sampling: Sampling, width: float) -> None:
    noise = torch.randn(3000, generator=torch.Generator().manual_seed(3)) * width
    kept = (probabilities(noise[None], [row(sampling)])[0] > 0).sum().item()
    expected = sum(p > 0 for p in oracle(noise.double().tolist(), sampling))
    # In float32 the border of a flat nucleus may fall a few ids beside that of the oracle.
    assert kept == pytest.approx(expected, rel=0.002)


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    random_logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(1)) * 2
    samplings = [
        Sampling(seed=i, temperature=[0.0, 1.0, 1.4][i % 3], top_p=[1.0, 0.8][i % 2], top_k=i)
        for i in range(16)
    ]
    rows = [row(sampling, position=i) for i, sampling in enumerate(samplings)]
    together = draw(random_logits, rows).ids
    alone = [draw(random_logits[i : i + 1], [rows[i]]).ids[0] for i in range(16)]
    order = list(range(16))
    random.Random(2).shuffle(order)
    shuffled = draw(random_logits[order], [rows[i] for i in order]).ids
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_seed_choice_and_position_all_key_the_draw() -> None:
    flat = torch.zeros(1, 5000)
    base = Sampling(seed=1)
    drawn = {
        draw(flat, [row(sampling, position=position)]).ids[0]
        for sampling in (base, Sampling(seed=2), Sampling(seed=1, choice=1))
        for position in (0, 1)
    }
    assert len(drawn) == 6
    assert draw(flat, [row(base)]).ids == draw(flat, [row(base)]).ids


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=1, temperature=0.0),
        Sampling(seed=1, temperature=1e-30),
        Sampling(seed=1, top_k=1),
        Sampling(seed=1, top_p=0.0),
        Sampling(seed=1, min_p=1.0),
    ],
)
def test_the_narrowest_settings_are_greedy(sampling: Sampling) -> None:
    rows = [row(sampling, position=position) for position in range(50)]
    assert set(draw(torch.tensor([LOGITS]).expand(50, -1), rows).ids) == {0}


def test_top_k_1_gives_one_id_even_where_two_tie() -> None:
    tied = torch.tensor([[1.0, 3.0, 3.0]])
    drawn = {draw(tied, [row(Sampling(seed=s, top_k=1))]).ids[0] for s in range(20)}
    assert len(drawn) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn(temperature: float) -> None:
    sampling = Sampling(seed=1, temperature=temperature)
    rows = [row(sampling, position=p, banned=(0, 10, 99, 4000)) for p in range(200)]
    drawn = set(draw(torch.tensor([LOGITS]).expand(200, -1), rows).ids)
    assert drawn
    assert not drawn & {0, 10}


def test_a_ban_of_everything_is_not_kept() -> None:
    drawn = draw(torch.tensor([[1.0, 2.0]]), [row(Sampling(seed=1), banned=(0, 1))])
    assert drawn.ids[0] in (0, 1)


def test_logprobs_are_raw_whatever_temperature_filters_and_bans_say() -> None:
    sampling = Sampling(seed=1, temperature=0.2, top_k=2, logprobs=True)
    drawn = draw(torch.tensor([LOGITS, LOGITS]), [row(sampling, banned=(0,)), row()])
    total = math.log(sum(math.exp(value) for value in LOGITS))
    assert drawn.ids[0] != 0
    assert drawn.logprobs[0] == pytest.approx(LOGITS[drawn.ids[0]] - total, abs=1e-5)
    assert math.isnan(drawn.logprobs[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_logits_that_are_no_numbers_spoil_only_themselves(temperature: float, top_p: float) -> None:
    sampling = Sampling(seed=1, temperature=temperature, top_p=top_p, logprobs=True)
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [[nan] * 3, [nan, 1.0, nan], [0.0, inf, 0.0], [-inf] * 3, [9.0, 0.0, 0.0]]
    )
    drawn = draw(logits, [row(sampling) for _ in logits])
    assert all(0 <= token < 3 for token in drawn.ids)
    assert drawn.ids[1:3] == [1, 1]
    assert drawn.ids[4] == 0
    assert drawn.unusable_rows == 2
    assert all(math.isfinite(value) for value in drawn.logprobs)


def test_bfloat16_logits_are_drawn_in_float32() -> None:
    logits = torch.tensor([LOGITS], dtype=torch.bfloat16)
    rows = [row(Sampling(seed=s, logprobs=True)) for s in range(1)]
    assert draw(logits, rows).ids == draw(logits.float(), rows).ids


def test_no_rows_give_no_draws() -> None:
    assert draw(torch.empty(0, 10), []).ids == []
