"""What the fake engine makes of bias, penalties and wishes for scores, against its oracle."""

import math
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.oracle import (
    Wishes,
    oracle_likeliest,
    oracle_logprob,
    oracle_output,
    oracle_state,
)
from tests.fakes.plans import reserved
from worker.config import FakeConfig
from worker.engine.engine import EngineInfo, Row, StepPlan, StepResult, run_step
from worker.engine.fake import FakeEngine
from worker.engine.vocabulary import Vocabulary
from worker.request import Sampling, Tops

EOS_ID = 2
ORDINARY = tuple(range(3, 40))
PROMPT = [5, 9, 5, 30]


def run(*rows: Row, eos_after: int = 0) -> StepResult:
    info = EngineInfo(
        block_tokens=4, kv_blocks=16, max_model_len=64, vocab_size=40, eos_ids=(EOS_ID,)
    )
    vocabulary = Vocabulary(ordinary=ORDINARY, size=40, eos_ids=(EOS_ID,), max_model_len=64)
    engine = reserved(FakeEngine(vocabulary, info, FakeConfig(eos_after=eos_after), []))
    return run_step(engine, StepPlan(0, rows))


def row(ids: list[int], sampling: Sampling, *, prompt: int = len(PROMPT)) -> Row:
    """A request that computes all its ids in this step."""
    return Row(
        request_id=1,
        ids=array("I", ids),
        start=0,
        blocks=[3, 1, 2],
        sampled=True,
        output_position=len(ids) - prompt,
        sampling=sampling,
        history=array("I", ids) if sampling.penalized else None,
        prompt_tokens=prompt,
    )


def sampling_of(wishes: Wishes) -> Sampling:
    return Sampling(
        seed=1,
        repetition_penalty=wishes.repetition,
        presence_penalty=wishes.presence,
        frequency_penalty=wishes.frequency,
        logit_bias=wishes.bias,
    )


biases = st.sampled_from((-100.0, -100.0, 100.0, 5.0))
wishes_ = st.builds(
    Wishes,
    repetition=st.sampled_from((1.0, 1.0, 1.5)),
    presence=st.sampled_from((0.0, 0.0, 0.5)),
    frequency=st.sampled_from((0.0, 0.0, -0.5)),
    bias=st.dictionaries(st.sampled_from(ORDINARY), biases, max_size=20).map(
        lambda given_: tuple(given_.items())
    ),
)


@given(wishes_, st.integers(0, 6))
def test_draws_are_the_oracle_s(wishes: Wishes, length: int) -> None:
    output = oracle_output(PROMPT, ORDINARY, length + 1, wishes)
    drawn = run(row(PROMPT + output[:length], sampling_of(wishes))).ids
    assert drawn == output[length:]


@pytest.mark.parametrize(
    "other",
    [
        Wishes(repetition=1.5, presence=0.5),
        Wishes(repetition=1.25),
        Wishes(presence=1.5),
        Wishes(frequency=1.5),
    ],
)
def test_each_penalty_changes_what_follows(other: Wishes) -> None:
    plain = oracle_output(PROMPT, ORDINARY, 8, Wishes(repetition=1.5))
    assert oracle_output(PROMPT, ORDINARY, 8, other) != plain
    assert oracle_output(PROMPT, ORDINARY, 8) != plain


def test_wrong_ids_and_a_wrong_end_of_the_prompt_change_what_follows() -> None:
    asked = Sampling(seed=1, presence_penalty=1.0)
    right = row([*PROMPT, 7, 8], asked)
    states = {
        "prompt": replace(right, prompt_tokens=5),
        "lost": replace(right, history=array("I", [*PROMPT, 7])),
        "swapped": replace(right, history=array("I", [*PROMPT, 8, 7])),
    }
    drawn = {name: run(wrong).ids for name, wrong in states.items()}
    assert all(ids != run(right).ids for ids in drawn.values())


def test_a_forced_id_comes_before_an_end_unless_it_is_banned() -> None:
    asked = Sampling(seed=1, logit_bias=((7, 100.0),))
    assert run(row(PROMPT, asked), eos_after=0).ids == [7]
    late = row([*PROMPT, 7], asked)
    assert run(late, eos_after=1).ids == [7]
    assert run(replace(late, banned=(7,)), eos_after=1).ids == [EOS_ID]


def test_a_bias_can_ban_an_end_and_even_everything() -> None:
    ended = row([*PROMPT, 7], Sampling(seed=1, logit_bias=((EOS_ID, -100.0),)))
    assert run(ended, eos_after=1).ids == oracle_output([*PROMPT, 7], ORDINARY, 1)
    everything = tuple((token_id, -100.0) for token_id in range(40))
    assert run(row(PROMPT, Sampling(seed=1, logit_bias=everything))).ids == oracle_output(
        PROMPT, ORDINARY, 1
    )


def test_logprobs_and_alternatives_are_those_of_the_state_whatever_is_drawn() -> None:
    bans = tuple((number, -100.0) for number, _ in oracle_likeliest(PROMPT, ORDINARY, 2))
    asked = Sampling(seed=1, logprobs=True, top_logprobs=3, logit_bias=bans)
    result = run(
        row(PROMPT, Sampling(seed=1, top_logprobs=5)),
        row(PROMPT, asked),
        row(PROMPT, Sampling(seed=1, logprobs=True)),
    )
    best = oracle_likeliest(PROMPT, ORDINARY, 3)
    assert result.ids[1] == best[2][0]
    assert math.isnan(result.logprobs[0])
    assert result.logprobs[1:] == pytest.approx([best[2][1], best[0][1]])
    assert result.tops.counts == [0, 3, 0]
    assert result.tops.ids == [number for number, _ in best]
    assert result.tops.logprobs == pytest.approx([value for _, value in best])
    assert oracle_state(PROMPT) % len(ORDINARY) == ORDINARY.index(best[0][0])


@pytest.mark.parametrize("top_logprobs", [0, 2])
def test_a_prompt_is_scored_from_the_states_before_its_ids(top_logprobs: int) -> None:
    asked = Sampling(seed=1, prompt_logprobs=True, top_logprobs=top_logprobs)
    scored = replace(row(PROMPT, asked), targets=array("I", PROMPT[1:]))
    result = run(row(PROMPT, Sampling(seed=1)), scored)
    assert result.tops == Tops()
    [(logprobs, tops)] = result.prompt
    knowns = [PROMPT[:1], PROMPT[:2], PROMPT[:3]]
    expected = [
        oracle_logprob(before, target, ORDINARY)
        for before, target in zip(knowns, PROMPT[1:], strict=True)
    ]
    assert logprobs == pytest.approx(expected)
    assert tops.counts == ([2, 2, 2] if top_logprobs else [])
    likeliest = [one for before in knowns for one in oracle_likeliest(before, ORDINARY, 2)]
    assert tops.ids == ([number for number, _ in likeliest] if top_logprobs else [])
