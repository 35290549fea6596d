"""Bias, penalties, bans, alternatives and prompt scores against a plain restatement.

Run: pytest tests/unit/worker/engine/test_sampler_penalties.py
"""

import math
from array import array

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.engine.engine import Row
from worker.engine.sampler import draw, is_plain_greedy
from worker.engine.scores import score
from worker.request import Sampling, Tops

VOCABULARY = 9

ids = st.integers(0, VOCABULARY - 1)
# A coarse grid: ties happen, and no arithmetic on it is rounded.
numbers = st.integers(-24, 24).map(lambda n: n / 4)
logits = st.lists(numbers, min_size=VOCABULARY, max_size=VOCABULARY)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 3),
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0]),
    top_p=st.sampled_from([1.0, 0.813]),
    top_k=st.integers(0, 4),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 12),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.75, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 2.0, 0.5, 4.0]),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCABULARY + 2), numbers), max_size=4).map(tuple),
)


@st.composite
def rows(draw_: st.DrawFn) -> Row:
    sampling = draw_(samplings)
    history = draw_(st.lists(ids, min_size=1, max_size=12))
    return Row(
        request_id=1,
        ids=array("I", [0]),
        start=0,
        blocks=[0],
        sampled=True,
        output_position=draw_(st.integers(0, 5)),
        sampling=sampling,
        banned=tuple(draw_(st.lists(st.integers(0, VOCABULARY + 1), max_size=3))),
        history=array("I", history) if sampling.penalized else None,
        prompt_tokens=draw_(st.integers(1, len(history))),
    )


def adjusted(given_: list[float], row: Row) -> list[float]:
    """The logits after what the request asks for, one id at a time."""
    sampling, seen = row.sampling, list(row.history or ())
    output = seen[row.prompt_tokens :]
    result = []
    for token, logit in enumerate(given_):
        value = logit + sum(bias for biased, bias in sampling.logit_bias if biased == token)
        if row.history is not None:
            if token in seen and value > 0:
                value /= sampling.repetition_penalty
            elif token in seen:
                value *= sampling.repetition_penalty
            if token in output:
                value -= sampling.presence_penalty
            value -= sampling.frequency_penalty * output.count(token)
        result.append(-math.inf if token in row.banned else value)
    return given_ if max(result) == -math.inf else result


def likeliest(given_: list[float], count: int) -> list[int]:
    return sorted(range(len(given_)), key=lambda token: (-given_[token], token))[:count]


def logprob(given_: list[float], token: int) -> float:
    return given_[token] - math.log(sum(math.exp(value) for value in given_))


def alternatives(tops: Tops, index: int) -> tuple[list[int], list[float]]:
    start = sum(tops.counts[:index])
    end = start + tops.counts[index]
    return tops.ids[start:end], tops.logprobs[start:end]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(logits, rows()), min_size=1, max_size=5))
def test_draws_equal_those_from_logits_adjusted_one_id_at_a_time(
    batch: list[tuple[list[float], Row]],
) -> None:
    drawn = draw(torch.tensor([given_ for given_, _ in batch]), [row for _, row in batch])
    for index, (given_, row) in enumerate(batch):
        plain = Sampling(
            seed=row.sampling.seed,
            temperature=row.sampling.temperature,
            top_p=row.sampling.top_p,
            top_k=row.sampling.top_k,
        )
        alone = Row(2, row.ids, 0, [0], True, row.output_position, plain)
        expected = adjusted(given_, row)
        assert drawn.ids[index] == draw(torch.tensor([expected]), [alone]).ids[0]
        if row.sampling.temperature == 0.0:
            assert drawn.ids[index] == likeliest(expected, 1)[0]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(logits, rows()), min_size=1, max_size=5))
def test_logprobs_and_alternatives_are_the_models_own(
    batch: list[tuple[list[float], Row]],
) -> None:
    drawn = draw(torch.tensor([given_ for given_, _ in batch]), [row for _, row in batch])
    asked = [row.sampling.top_logprobs if row.sampling.logprobs else 0 for _, row in batch]
    assert len(drawn.tops.counts) == (len(batch) if any(asked) else 0)
    assert sum(drawn.tops.counts) == len(drawn.tops.ids) == len(drawn.tops.logprobs)
    for index, (given_, row) in enumerate(batch):
        value = drawn.logprobs[index]
        assert math.isnan(value) != row.sampling.logprobs
        if row.sampling.logprobs:
            assert value == pytest.approx(logprob(given_, drawn.ids[index]), abs=1e-4)
        if any(asked):
            tokens, values = alternatives(drawn.tops, index)
            assert tokens == likeliest(given_, asked[index])
            assert values == pytest.approx([logprob(given_, one) for one in tokens], abs=1e-4)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(logits, rows()), min_size=2, max_size=6))
def test_a_row_gets_the_same_whatever_is_beside_it(
    batch: list[tuple[list[float], Row]],
) -> None:
    together = draw(torch.tensor([g for g, _ in batch]), [row for _, row in batch])
    for index, (given_, row) in enumerate(batch):
        alone = draw(torch.tensor([given_]), [row])
        assert together.ids[index] == alone.ids[0]
        assert together.logprobs[index : index + 1] == pytest.approx(
            alone.logprobs, abs=0, nan_ok=True
        )
        if alone.tops.counts:
            assert alternatives(together.tops, index) == alternatives(alone.tops, 0)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(logits, ids), min_size=1, max_size=5), st.integers(0, 12))
def test_scores_of_a_prompt_are_its_ids_logprobs(
    batch: list[tuple[list[float], int]], top_logprobs: int
) -> None:
    targets = [target for _, target in batch]
    logprobs, tops = score(torch.tensor([given_ for given_, _ in batch]), targets, top_logprobs)
    assert logprobs == pytest.approx([logprob(*one) for one in batch], abs=1e-4)
    assert len(tops.counts) == (len(batch) if top_logprobs else 0)
    for index in range(len(tops.counts)):
        assert alternatives(tops, index)[0] == likeliest(batch[index][0], top_logprobs)


def test_a_long_prompt_is_scored_as_its_parts_are() -> None:
    many = torch.randn(150, 40, generator=torch.Generator().manual_seed(4))
    targets = [index % 40 for index in range(150)]
    logprobs, tops = score(many, targets, 3)
    for index in (0, 63, 64, 149):
        alone, top = score(many[index : index + 1], targets[index : index + 1], 3)
        assert logprobs[index : index + 1] == alone
        assert alternatives(tops, index) == alternatives(top, 0)


def seeded(index: int) -> Row:
    """One of a mixture of all that a request may ask for, with a history of its own."""
    sampling = Sampling(
        seed=index,
        temperature=[0.0, 0.8, 1.3][index % 3],
        top_p=[1.0, 0.9, 0.4][index % 3],
        top_k=[0, 40, 0, 3000][index % 4],
        logprobs=index % 2 == 0,
        top_logprobs=index % 5,
        presence_penalty=[0.0, 0.6][index % 2],
        repetition_penalty=[1.0, 1.3][index // 2 % 2],
        logit_bias=((index, 4.0), (index + 1, -100.0)) if index % 3 else (),
    )
    history = array("I", [(index * 31 + n * n) % 40_000 for n in range(200)])
    return Row(
        index,
        array("I", [0]),
        0,
        [0],
        True,
        index,
        sampling,
        (index,) if index % 4 == 0 else (),
        history=history if sampling.penalized else None,
        prompt_tokens=90,
    )


def test_a_real_vocabulary_draws_the_same_alone_and_in_a_batch_of_32() -> None:
    # Wide enough that torch sums a single row in another order than one of many.
    wide = torch.randn(32, 40_000, generator=torch.Generator().manual_seed(7)) * 2
    rows_ = [seeded(index) for index in range(32)]
    together = draw(wide, rows_)
    for index, row in enumerate(rows_):
        alone = draw(wide[index : index + 1], [row])
        assert alone.ids[0] == together.ids[index]
        assert alone.logprobs == pytest.approx(
            together.logprobs[index : index + 1], abs=0, nan_ok=True
        )
        if alone.tops.counts:
            assert alternatives(alone.tops, 0) == alternatives(together.tops, index)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_and_of_minus_100_forbids(temperature: float) -> None:
    forced = Sampling(seed=1, temperature=temperature, logit_bias=((2, 100.0),))
    barred = Sampling(seed=1, temperature=temperature, logit_bias=((0, -100.0),))
    for position in range(50):
        pair = [
            Row(1, array("I", [0]), 0, [0], True, position, sampling)
            for sampling in (forced, barred)
        ]
        drawn = draw(torch.tensor([[9.0, 1.0, -9.0]] * 2), pair).ids
        assert drawn[0] == 2
        assert drawn[1] == 1


def test_impossible_ids_are_no_alternatives() -> None:
    sampling = Sampling(seed=1, temperature=0.0, logprobs=True, top_logprobs=4)
    row = Row(1, array("I", [0]), 0, [0], True, 0, sampling)
    tops = draw(torch.tensor([[math.nan, 1.0, 1.0, -math.inf]]), [row]).tops
    assert (tops.counts, tops.ids) == ([2], [1, 2])
    assert tops.logprobs == pytest.approx([-math.log(2)] * 2)


def test_penalties_that_leave_no_number_are_not_kept() -> None:
    sampling = Sampling(seed=1, repetition_penalty=2.0)
    row = Row(
        1, array("I", [0]), 0, [0], True, 0, sampling, history=array("I", [0, 1]), prompt_tokens=2
    )
    assert draw(torch.tensor([[-3e38, -3e38]]), [row]).ids[0] in (0, 1)
    shrunk = Sampling(seed=1, repetition_penalty=0.01)
    row = Row(1, array("I", [0]), 0, [0], True, 0, shrunk, history=array("I", [1]), prompt_tokens=1)
    assert draw(torch.tensor([[0.0, 3e38]]), [row]).ids == [1]


@pytest.mark.parametrize(
    ("sampling", "banned", "plain"),
    [
        (Sampling(seed=1, temperature=0.0), (), True),
        (Sampling(seed=1, top_k=1), (), True),
        (Sampling(seed=1), (), False),
        (Sampling(seed=1, temperature=0.0), (3,), False),
        (Sampling(seed=1, temperature=0.0, logprobs=True), (), False),
        (Sampling(seed=1, temperature=0.0, logit_bias=((1, 0.5),)), (), False),
        (Sampling(seed=1, temperature=0.0, presence_penalty=0.5), (), False),
        (Sampling(seed=1, temperature=0.0, repetition_penalty=1.1), (), False),
    ],
)
def test_only_a_draw_that_is_the_raw_argmax_is_plain(
    sampling: Sampling, banned: tuple[int, ...], plain: bool
) -> None:
    history = array("I", [1, 2]) if sampling.penalized else None
    row = Row(1, array("I", [0]), 0, [0], True, 0, sampling, banned, history=history)
    assert is_plain_greedy(row) is plain
