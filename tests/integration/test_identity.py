"""The default model in float32 gives the same greedy ids, however its ranks are arranged.

Real rank processes, started through the library. What is expected is what transformers
itself generates. Every pair of (shape, overlap, dp, chunk) is in the ordinary run, all
combinations in `make test-long`; each engine is asked with an empty cache and a full one.
"""

import itertools
from dataclasses import dataclass

import pytest
from transformers import AutoTokenizer

from radixmesh.models import resolve
from tests.fakes.tiny_models import generate
from worker import Engine, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.e2e, pytest.mark.timeout(240)]

COUNT = 10
QUESTIONS = (
    "What is the capital of France, and which river runs through it?",
    "What is the capital of France, and how many people live there today?",
    "Großvater sagt: 你好, 世界! 🎉 Translate that.",
)
SYSTEM = "You answer in one short sentence, and you never say what you do not know for certain."


@dataclass(frozen=True)
class Arrangement:
    """One way to run a model."""

    tp: int
    pp: int
    overlap: bool
    dp: int
    chunk: int

    def __str__(self) -> str:
        overlap = "overlapped" if self.overlap else "plain"
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}-{overlap}-chunk{self.chunk}"


def arrangement(shape: tuple[int, int], overlap: str, dp: int, chunk: int) -> Arrangement:
    return Arrangement(*shape, overlap == "on", dp, chunk)


# Overlap is of one stage; several stages have steps under way anyway.
PAIRS = [
    arrangement((1, 1), "off", 1, 16),
    arrangement((1, 1), "on", 2, 512),
    arrangement((2, 1), "on", 1, 512),
    arrangement((2, 1), "off", 2, 16),
    arrangement((3, 1), "off", 1, 512),
    arrangement((3, 1), "on", 2, 16),
    arrangement((1, 2), "off", 1, 16),
    arrangement((1, 2), "off", 2, 512),
    arrangement((2, 2), "off", 1, 512),
    arrangement((2, 2), "off", 2, 16),
]
ALL = [
    arrangement(shape, overlap, dp, chunk)
    for shape, overlap, dp, chunk in itertools.product(
        [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)], ("off", "on"), (1, 2), (16, 512)
    )
    if overlap == "off" or shape[1] == 1
]


@dataclass(frozen=True)
class Expected:
    """Prompts and what follows them."""

    prompts: list[list[int]]
    outputs: list[list[int]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    folder = resolve("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}],
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for question in QUESTIONS
    ]
    return Expected(prompts, [generate(folder, prompt, COUNT) for prompt in prompts])


def check(how: Arrangement, expected: Expected) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with Engine(
        "smollm2",
        dp=how.dp,
        pp=how.pp,
        tp=how.tp,
        dtype="float32",
        overlap="on" if how.overlap else "off",
        max_batched_tokens=how.chunk,
        kv_tokens=2048,
        threads=1,
        peer_timeout_s=30.0,  # twelve ranks on two cores wait long for their turn
    ) as engine:
        first = engine.generate(expected.prompts, greedy)
        again = engine.generate(expected.prompts, greedy)
    assert [output.ids for output in first] == expected.outputs
    assert [output.ids for output in again] == expected.outputs
    assert how.dp > 1 or all(output.cached_tokens > 0 for output in again)


@pytest.mark.parametrize("how", PAIRS, ids=str)
def test_ranks_in_any_arrangement_give_the_ids_of_the_whole_model(
    how: Arrangement, expected: Expected
) -> None:
    check(how, expected)


@pytest.mark.long
@pytest.mark.parametrize("how", [each for each in ALL if each not in PAIRS], ids=str)
def test_every_arrangement_gives_the_ids_of_the_whole_model(
    how: Arrangement, expected: Expected
) -> None:
    check(how, expected)
