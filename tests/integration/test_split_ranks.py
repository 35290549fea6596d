"""A tiny model split over rank processes against transformers' own generate.

Run: pytest tests/integration/test_split_ranks.py
"""

import random
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.model_dir import VOCAB_SIZE, make_model_dir
from tests.fakes.tiny_models import NINE_HEADS, generate, make_tiny_model
from worker import Engine, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

COUNT = 10


def make_model(folder: Path, seed: int = 0) -> Path:
    make_model_dir(folder)
    return make_tiny_model(folder, "llama", seed=seed, vocab_size=VOCAB_SIZE, **NINE_HEADS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("nine"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = random.Random(8)
    shared = [draw.randrange(1, VOCAB_SIZE) for _ in range(32)]
    return [
        shared[: 8 * n] + [draw.randrange(1, VOCAB_SIZE) for _ in range(n)] for n in range(1, 6)
    ]


@pytest.mark.parametrize(
    ("tp", "pp", "settings"),
    [
        (2, 1, {"tensors": "shm", "overlap": "on"}),
        (3, 1, {"tensors": "gloo", "overlap": "off"}),
        pytest.param(1, 2, {"max_batched_tokens": 16}, marks=pytest.mark.long),
        (2, 2, {"tensors": "shm", "carrier": "gloo"}),
    ],
)
def test_rank_processes_give_what_the_whole_model_gives(
    model: Path, prompts: list[list[int]], tp: int, pp: int, settings: dict[str, Any]
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    drawn = SamplingParams(seed=5, max_tokens=4, logprobs=True, top_logprobs=2)
    with Engine(model, tp=tp, pp=pp, dtype="float32", kv_tokens=2048, **settings) as engine:
        for _ in range(2):  # the second time from the cache
            outputs = engine.generate(prompts, greedy)
            assert [one.ids for one in outputs] == [generate(model, p, COUNT) for p in prompts]
        [first], [again] = (engine.generate([prompts[0]], drawn) for _ in range(2))
        assert first.ids == again.ids
        assert len(first.tops[0]) == 2


def test_weights_change_on_all_rank_processes(
    model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", seed=1)
    greedy = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with Engine(model, tp=2, pp=2, dtype="float32", kv_tokens=2048) as engine:
        engine.update_weights(other, "2")
        [output] = engine.generate([prompts[3]], greedy)
        assert output.ids == generate(other, prompts[3], COUNT)
        assert output.weight_version == "2"
