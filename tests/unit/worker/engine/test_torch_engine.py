"""The torch engine against transformers' own generate, on tiny models of several families.

Run: pytest tests/unit/worker/engine/test_torch_engine.py
"""

import random
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from tests.fakes.plans import GREEDY, Stream, reserved, run, step
from tests.fakes.tiny_models import FAMILIES, MAX_MODEL_LEN, VOCAB_SIZE, generate, make_tiny_model
from worker.config import RankConfig
from worker.engine.torch_engine import TorchEngine
from worker.request import Sampling

BLOCK_TOKENS = 8
COUNT = 12


@dataclass(frozen=True)
class Case:
    engine: TorchEngine
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def load(folder: Path, **changes: object) -> TorchEngine:
    config = RankConfig(
        model_dir=str(folder),
        dtype="float32",
        block_tokens=BLOCK_TOKENS,
        kv_tokens=64 * BLOCK_TOKENS,
        threads=1,
    )
    return reserved(TorchEngine.load(msgspec.structs.replace(config, **changes)))


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = make_tiny_model(tmp_path_factory.mktemp(request.param), request.param)
    draw = random.Random(7)
    prompts = [[draw.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 5, 17, 40)]
    expected = [generate(folder, prompt, COUNT) for prompt in prompts]
    return Case(load(folder), folder, prompts, expected)


def streams(prompts: list[list[int]], *, seed: int = 1) -> list[Stream]:
    """Give every prompt its own shuffled share of the pool."""
    blocks = list(range(64))
    random.Random(seed).shuffle(blocks)
    per_stream = 8
    return [
        Stream(prompt, blocks[i * per_stream : (i + 1) * per_stream])
        for i, prompt in enumerate(prompts)
    ]


def test_the_outputs_of_the_oracle_vary(case: Case) -> None:
    assert len({token for output in case.expected for token in output}) > COUNT / 2


def test_a_prompt_alone_gives_what_transformers_generates(case: Case) -> None:
    for prompt, expected in zip(case.prompts, case.expected, strict=True):
        alone = streams([prompt])
        run(case.engine, alone, COUNT)
        assert alone[0].output == expected


def test_prompts_of_unequal_length_in_one_batch_give_the_same(case: Case) -> None:
    together = streams(case.prompts)
    run(case.engine, together, COUNT)
    assert [stream.output for stream in together] == case.expected


@pytest.mark.parametrize("chunk", [1, 3, 8, 16])
def test_chunked_prefills_beside_decodes_give_the_same(case: Case, chunk: int) -> None:
    together = streams(case.prompts)
    run(case.engine, together, COUNT, chunk=chunk)
    assert [stream.output for stream in together] == case.expected


def test_a_sequence_that_starts_on_the_blocks_of_another_gives_the_same(case: Case) -> None:
    prompt, expected = case.prompts[3], case.expected[3]
    first, second = streams([prompt, prompt])
    run(case.engine, [first], 1)
    shared = 4
    second.table[:shared] = first.table[:shared]
    second.computed = shared * BLOCK_TOKENS
    run(case.engine, [second], COUNT)
    assert second.output == expected


def test_a_resumed_output_goes_on_as_it_would_have(case: Case) -> None:
    prompt, expected = case.prompts[2], case.expected[2]
    (resumed,) = streams([prompt])
    resumed.ids += expected[:5]
    run(case.engine, [resumed], COUNT)
    assert resumed.output == expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    return load(make_tiny_model(tmp_path_factory.mktemp("llama"), "llama"))


PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84, 62, 64, 33, 83, 27, 95, 2, 88]


def logits(engine: TorchEngine, stream: Stream) -> torch.Tensor:
    return engine.logits((stream.row(0, 1 << 30),))


def test_where_the_blocks_lie_changes_no_bit_of_the_logits(llama: TorchEngine) -> None:
    ordered, permuted = Stream(PROMPT, [0, 1, 2]), Stream(PROMPT, [40, 7, 63])
    for stream in (ordered, permuted):
        step(llama, [stream], chunk=10)
    assert torch.equal(logits(llama, ordered), logits(llama, permuted))


def test_a_reused_block_shows_nothing_of_its_earlier_owner(llama: TorchEngine) -> None:
    fresh = Stream(PROMPT[:9], [50, 51])
    step(llama, [fresh], chunk=8)
    expected = logits(llama, fresh)
    step(llama, [Stream([9] * 24, [2, 5, 6])])
    reused = Stream(PROMPT[:9], [5, 2])
    step(llama, [reused], chunk=8)
    assert torch.equal(logits(llama, reused), expected)


def test_a_wrong_block_changes_the_logits(llama: TorchEngine) -> None:
    right, wrong = Stream(PROMPT, [0, 1, 2]), Stream(PROMPT, [0, 1, 2])
    step(llama, [right], chunk=16)
    wrong.computed, wrong.table = right.computed, [1, 0, 2]
    assert not torch.allclose(logits(llama, right), logits(llama, wrong))


def test_numbers_that_are_not_reach_no_other_sequence(tmp_path: Path) -> None:
    engine = load(make_tiny_model(tmp_path, "llama"))
    healthy = Stream(PROMPT[:9], [10, 11])
    step(engine, [healthy], chunk=8)
    expected = logits(engine, healthy)
    embedding = engine._model.module.get_input_embeddings().weight
    poison = 199
    with torch.no_grad():
        embedding[poison] = float("nan")
    sick = Stream([poison] * 16, [20, 21])
    step(engine, [sick])
    assert len(sick.output) == 1
    assert 0 <= sick.output[0] < VOCAB_SIZE
    reused = Stream(PROMPT[:9], [20, 21])
    step(engine, [reused], chunk=8)
    beside = Stream([poison] * 5, [30])
    mixed = engine.logits((reused.row(0, 99), beside.row(1, 99)))
    assert torch.allclose(mixed[0], expected[0], atol=1e-5)


def test_only_rows_that_draw_give_logits(llama: TorchEngine) -> None:
    first, second = Stream(PROMPT, [0, 1, 2]), Stream(PROMPT, [3, 4, 5])
    rows = (first.row(0, 4), second.row(1, 99))
    assert llama.logits(rows).shape == (1, VOCAB_SIZE)
    assert llama.logits((first.row(0, 4),)).shape == (0, VOCAB_SIZE)


def test_sampled_outputs_do_not_depend_on_the_batch(llama: TorchEngine) -> None:
    def sampled(seed: int, table: list[int]) -> Stream:
        return Stream(PROMPT, table, Sampling(seed=seed, temperature=2.0, top_p=0.95))

    alone = [sampled(seed, [0, 1, 2, 3]) for seed in range(4)]
    for stream in alone:
        run(llama, [stream], COUNT)
    together = [sampled(seed, list(range(4 * seed, 4 * seed + 4))) for seed in reversed(range(4))]
    run(llama, together, COUNT, chunk=7)
    assert [s.output for s in reversed(together)] == [s.output for s in alone]
    assert len({tuple(s.output) for s in alone}) == 4


def test_a_resumed_sampled_output_draws_what_was_lost(llama: TorchEngine) -> None:
    sampling = Sampling(seed=11, temperature=2.0)
    whole = Stream(PROMPT, [0, 1, 2, 3], sampling)
    run(llama, [whole], COUNT)
    resumed = Stream(PROMPT + whole.output[:5], [8, 9, 10, 11], sampling, prompt=len(PROMPT))
    run(llama, [resumed], COUNT)
    assert resumed.output == whole.output


def test_logprobs_are_given_where_asked(llama: TorchEngine) -> None:
    asked = Stream(PROMPT, [0, 1, 2], Sampling(seed=0, temperature=0.0, logprobs=True))
    silent = Stream(PROMPT, [3, 4, 5], GREEDY)
    expected = logits(llama, silent).float().log_softmax(-1).max().item()
    step(llama, [asked, silent])
    assert asked.logprobs[0] == pytest.approx(expected, abs=1e-4)
    assert silent.logprobs[0] != silent.logprobs[0]


def test_the_engine_tells_what_it_can_take(llama: TorchEngine) -> None:
    info = llama.info
    assert (info.block_tokens, info.kv_blocks) == (BLOCK_TOKENS, 64)
    assert (info.max_model_len, info.vocab_size, info.eos_ids) == (MAX_MODEL_LEN, VOCAB_SIZE, ())


def test_a_pool_too_small_for_the_warm_up_still_loads(tmp_path: Path) -> None:
    engine = load(make_tiny_model(tmp_path, "llama"), kv_tokens=1)
    assert engine.info.kv_blocks == 1
    engine.close()


def test_bfloat16_errs_little_against_float32(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", initializer_range=0.1)
    exact, coarse = load(folder), load(folder, dtype="bfloat16")
    first, second = Stream(PROMPT, [0, 1, 2]), Stream(PROMPT, [0, 1, 2])
    expected, given = logits(exact, first), logits(coarse, second).float()
    error = (expected - given).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 0 < error < 0.05
