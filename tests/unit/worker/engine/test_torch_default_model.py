"""The default model in float32 equals transformers' generate id by id; bfloat16 by its error.

Needs the converted default model: `make setup`, or `radixmesh-convert smollm2`.
Run: pytest tests/unit/worker/engine/test_torch_default_model.py
"""

from array import array
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from radixmesh.models import resolve
from tests.fakes.plans import GREEDY, Stream, reserved, run, step
from tests.fakes.tiny_models import generate
from tests.fakes.torch_replica import TorchReplica
from worker.config import RankConfig
from worker.engine.engine import Row
from worker.engine.torch_engine import TorchEngine

pytestmark = [pytest.mark.model, pytest.mark.timeout(180)]

COUNT = 12
QUESTIONS = (
    "What is the capital of France?",
    "Write a short story about a river, a bridge and a child who counts boats.",
    "Großvater sagt: 你好, 世界! 🎉 Translate that.",
)


@dataclass(frozen=True)
class Default:
    folder: Path
    engine: TorchEngine
    prompts: list[list[int]]
    expected: list[list[int]]

    def streams(self) -> list[Stream]:
        return [
            Stream(prompt, list(range(i, 48, len(self.prompts))))
            for i, prompt in enumerate(self.prompts)
        ]


def load(folder: Path, dtype: str) -> TorchEngine:
    config = RankConfig(model_dir=str(folder), dtype=dtype, kv_tokens=48 * 16, threads=1)
    return reserved(TorchEngine.load(config))


@pytest.fixture(scope="module")
def default() -> Default:
    folder = resolve("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=True,
            )["input_ids"]
        )
        for question in QUESTIONS
    ]
    expected = [generate(folder, prompt, COUNT) for prompt in prompts]
    return Default(folder, load(folder, "float32"), prompts, expected)


def test_prompts_alone(default: Default) -> None:
    for stream, expected in zip(default.streams(), default.expected, strict=True):
        run(default.engine, [stream], COUNT)
        assert stream.output == expected


def test_prompts_in_one_batch(default: Default) -> None:
    streams = default.streams()
    run(default.engine, streams, COUNT)
    assert [stream.output for stream in streams] == default.expected


def test_prompts_in_chunks(default: Default) -> None:
    streams = default.streams()
    run(default.engine, streams, COUNT, chunk=13)
    assert [stream.output for stream in streams] == default.expected


def test_a_cached_prefix(default: Default) -> None:
    first, second = default.streams()[1], default.streams()[0]
    step(default.engine, [first])
    again = Stream(default.prompts[1], [first.table[0], first.table[1], *second.table])
    again.computed = 32
    run(default.engine, [again], COUNT)
    assert again.output == default.expected[1]


def check_split(default: Default, *, tp: int, pp: int, chunk: int) -> None:
    replica = TorchReplica.load(default.folder, tp=tp, pp=pp, block_tokens=16, kv_tokens=48 * 16)
    streams = default.streams()
    run(replica, streams, COUNT, chunk=chunk)
    assert [stream.output for stream in streams] == default.expected
    replica.close()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_ranks_give_what_one_gives(default: Default, tp: int, pp: int) -> None:
    check_split(default, tp=tp, pp=pp, chunk=16)


@pytest.mark.long
@pytest.mark.parametrize("chunk", [16, 512])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_every_split_gives_what_one_rank_gives(
    default: Default, tp: int, pp: int, chunk: int
) -> None:
    check_split(default, tp=tp, pp=pp, chunk=chunk)


def test_the_answer_makes_sense(default: Default) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default.folder)
    (stream,) = default.streams()[:1]
    run(default.engine, [stream], COUNT)
    assert "Paris" in tokenizer.decode(stream.output)
    assert set(default.engine.info.eos_ids) & set(stream.output)


def test_bfloat16_errs_no_more_than_transformers_does(default: Default) -> None:
    ours, theirs = load(default.folder, "bfloat16"), logits(default, torch.bfloat16)
    exact = logits(default, torch.float32)
    given = torch.stack(
        [
            ours.logits((Row(0, array("I", prompt), 0, [0, 1, 2, 3, 4], True, 0, GREEDY),))[0]
            for prompt in default.prompts
        ]
    )
    assert 0 < rms(given - exact) < 1.3 * rms(theirs - exact)


def logits(default: Default, dtype: torch.dtype) -> torch.Tensor:
    """Return transformers' own logits after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(default.folder, dtype=dtype)
    with torch.inference_mode():
        rows = [model(torch.tensor([prompt])).logits[0, -1] for prompt in default.prompts]
    return torch.stack(rows).float()


def rms(error: torch.Tensor) -> float:
    return float(error.float().pow(2).mean().sqrt())
