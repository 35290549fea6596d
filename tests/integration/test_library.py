"""The library with real rank processes and the fake engine: outputs, errors, threads and loops."""

import array
import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixmesh import errors
from tests.fakes.library import fake_engine, my_ranks
from tests.fakes.oracle import oracle_output, ordinary_ids
from worker import Engine, Output, Piece, SamplingParams

pytestmark = [pytest.mark.e2e]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Any:
    with fake_engine(model_dir, dp=2, tp=2, max_running=4, max_waiting=3) as engine:
        yield engine


@pytest.fixture(scope="module")
def ordinary(model_dir: Path) -> list[int]:
    return ordinary_ids(model_dir)


def test_the_engine_has_a_process_for_each_rank_and_says_what_it_is(engine: Engine) -> None:
    assert len(my_ranks()) == 4
    assert (engine.info.dp, engine.info.tp, engine.info.vocab_size) == (2, 2, 1000)
    assert repr(engine) == "<Engine tiny dp=2, pp=1, tp=2, open>"


def test_more_prompts_than_the_queues_hold_come_back_exact_and_in_order(
    engine: Engine, ordinary: list[int]
) -> None:
    prompts = [[5 + at % 900, at % 7 + 4, at % 11 + 4] for at in range(300)]
    seen: list[Output] = []
    outputs = engine.generate(prompts, GREEDY, on_output=seen.append)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.ids == oracle_output(prompt, ordinary, 12)
        assert (output.prompt_ids, output.finish_reason, output.error) == (prompt, "length", None)
    assert sorted(each.prompt for each in seen) == list(range(300))
    assert {id(each) for each in seen} == {id(each) for each in outputs}


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, lambda ids: array.array("q", ids), iter])
def test_ids_come_as_anything_that_gives_whole_numbers(
    engine: Engine, ordinary: list[int], kind: Any
) -> None:
    [output] = engine.generate([kind([7, 8, 9])], GREEDY)
    assert output.ids == oracle_output([7, 8, 9], ordinary, 12)
    assert output.prompt_ids == [7, 8, 9]
    assert output.text is None


def test_a_text_is_encoded_and_its_output_decoded(engine: Engine, ordinary: list[int]) -> None:
    text = "The capital of France is"
    [output, other] = engine.generate([text, [5, 6]], GREEDY)
    assert output.prompt_ids == engine.tokenizer.encode(text)
    assert output.ids == oracle_output(output.prompt_ids, ordinary, 12)
    assert output.text == engine.tokenizer.decode(output.ids, skip_special_tokens=True)
    assert other.text is None
    [output, other] = engine.generate([text, [5, 6]], GREEDY, decode=True)
    assert other.text == engine.tokenizer.decode(other.ids, skip_special_tokens=True)


def test_choices_of_a_prompt_follow_each_other_and_share_its_blocks(engine: Engine) -> None:
    prompts = [[at + 4] * 48 for at in range(3)]
    engine.flush_cache()
    outputs = engine.generate(prompts, SamplingParams(n=4, max_tokens=1))
    assert [(each.prompt, each.choice) for each in outputs] == [
        (prompt, choice) for prompt in range(3) for choice in range(4)
    ]
    assert engine.flush_cache() == 9, "three blocks a prompt, on one replica each"


def test_each_prompt_may_have_its_own_sampling(engine: Engine) -> None:
    lengths = [1, 5, 3]
    sampling = [SamplingParams(max_tokens=length, logprobs=length == 5) for length in lengths]
    outputs = engine.generate([[5], [6], [7]], sampling)
    assert [len(each.ids) for each in outputs] == lengths
    assert [len(each.logprobs) for each in outputs] == [0, 5, 0]
    with pytest.raises(errors.InvalidRequest, match="2 sampling parameters for 3 prompts"):
        engine.generate([[5], [6], [7]], sampling[:2])


def test_an_output_is_at_most_what_the_context_leaves_when_nobody_says(engine: Engine) -> None:
    room = 3
    [output, short] = engine.generate([[5] * (engine.info.max_model_len - room), [5]])
    assert len(output.ids) == room
    assert len(short.ids) == 256


BAD: list[tuple[Any, SamplingParams, type[errors.MeshError]]] = [
    ([], GREEDY, errors.InvalidRequest),
    ([-1], GREEDY, errors.InvalidRequest),
    ([1.5], GREEDY, errors.InvalidRequest),
    (b"bytes", GREEDY, errors.InvalidRequest),
    (7, GREEDY, errors.InvalidRequest),
    (np.zeros((2, 2), dtype=np.int64), GREEDY, errors.InvalidRequest),
    ([1000], GREEDY, errors.UnknownToken),
    ([5] * 5000, GREEDY, errors.PromptTooLong),
    ([5], SamplingParams(temperature=-1), errors.BadSampling),
    ([5], SamplingParams(temperature="hot"), errors.BadSampling),  # type: ignore[arg-type]
    ([5], SamplingParams(n=0), errors.BadSampling),
    ("\udcff", GREEDY, errors.InvalidRequest),
]


@pytest.mark.parametrize(("prompt", "sampling", "kind"), BAD)
def test_a_bad_prompt_fails_alone_and_by_its_kind(
    engine: Engine, prompt: Any, sampling: SamplingParams, kind: type[errors.MeshError]
) -> None:
    with pytest.raises(kind):
        engine.generate([[5], prompt], [GREEDY, sampling])
    [fine, bad, last] = engine.generate(
        [[5], prompt, "hello"], [GREEDY, sampling, GREEDY], raise_errors=False
    )
    assert isinstance(bad.error, kind)
    assert bad.finish_reason is None
    assert bad.ids == []
    assert fine.error is last.error is None
    assert len(fine.ids) == len(last.ids) == 12


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"top_k": 2**70}, {}),
        ({"max_tokens": 2**70}, {}),
        ({}, {"priority": 2**70}),
        ({}, {"priority": 1.5}),
        ({}, {"cache_salt": "\ud800"}),
        ({}, {"cache_salt": 5}),
    ],
)
def test_what_cannot_travel_to_the_ranks_is_refused_at_once(
    engine: Engine, fields: dict[str, Any], options: Any
) -> None:
    ranks = {rank.pid for rank in my_ranks()}
    with pytest.raises(errors.InvalidRequest):
        engine.generate([[5, 6]], SamplingParams(**({"max_tokens": 2} | fields)), **options)
    assert {rank.pid for rank in my_ranks()} == ranks


def test_one_prompt_that_is_not_in_a_list_is_refused(engine: Engine) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"give \[prompt\]"):
        engine.generate("hello")


def test_an_option_that_there_is_not_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(errors.InvalidRequest, match="banana: there is no such option"):
        engine.generate([[5, 6]], banana=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("sampling", [{"max_tokens": 2}, [{"max_tokens": 2}], 5])
def test_sampling_of_another_kind_is_refused_by_name(engine: Engine, sampling: Any) -> None:
    with pytest.raises(errors.InvalidRequest, match="expected SamplingParams"):
        engine.generate([[5, 6]], sampling)


def test_no_prompts_give_no_outputs(engine: Engine) -> None:
    assert engine.generate([]) == []


def test_many_threads_may_ask_at_once(engine: Engine, ordinary: list[int]) -> None:
    got: dict[int, list[list[int]]] = {}

    def ask(at: int) -> None:
        outputs = engine.generate([[at + 4, each + 4] for each in range(20)], GREEDY)
        got[at] = [output.ids for output in outputs]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in range(6):
        assert got[at] == [oracle_output([at + 4, each + 4], ordinary, 12) for each in range(20)]


async def test_a_callers_loop_goes_on_while_outputs_are_made(
    engine: Engine, ordinary: list[int]
) -> None:
    seen: list[Output] = []
    one, other = await asyncio.gather(
        engine.generate_async([[5], [6]], GREEDY, on_output=seen.append),
        engine.generate_async([[7]], GREEDY),
    )
    assert [each.ids for each in (*one, *other)] == [
        oracle_output([at], ordinary, 12) for at in (5, 6, 7)
    ]
    assert len(seen) == 2
    # Blocking the loop is allowed too: the engine does not need it.
    assert engine.generate([[5]], GREEDY)[0].ids == oracle_output([5], ordinary, 12)


async def test_a_stream_has_the_ids_and_the_text_of_the_whole_output(engine: Engine) -> None:
    text = "Once upon a time"
    sampling = SamplingParams(temperature=0.0, max_tokens=40, logprobs=True)
    [whole] = await engine.generate_async([text], sampling)
    pieces: list[Piece] = [piece async for piece in engine.stream(text, sampling)]
    assert len(pieces) > 5
    assert [at for piece in pieces for at in piece.ids] == whole.ids
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [value for piece in pieces for value in piece.logprobs] == whole.logprobs
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"


async def test_a_stream_raises_what_its_prompt_is_refused_for(engine: Engine) -> None:
    with pytest.raises(errors.UnknownToken):
        [piece async for piece in engine.stream([1000])]
    with pytest.raises(errors.InvalidRequest, match="one output"):
        [piece async for piece in engine.stream([5], SamplingParams(n=2))]


def test_the_cache_is_flushed_by_number(model_dir: Path) -> None:
    with fake_engine(model_dir, dp=2) as engine:
        engine.flush_cache()
        prompts = [[at + 4] * 48 for at in range(4)]
        engine.generate(prompts, SamplingParams(max_tokens=1))
        assert engine.flush_cache() == 12
        assert all(each.cached_tokens == 0 for each in engine.generate(prompts, GREEDY))
        assert engine.flush_cache() > 0
