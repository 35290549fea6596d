"""A model split over ranks gives the ids that it gives whole, in float32.

Ranks are threads here; what they exchange goes through tests/fakes/tensor_groups.py.
Run: pytest tests/unit/worker/engine/test_torch_split.py
"""

import random
from array import array
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from radixmesh.errors import RankDesync
from tests.fakes.plans import GREEDY, Stream, run, step
from tests.fakes.tensor_groups import ThreadGroup
from tests.fakes.tiny_models import NINE_HEADS, VOCAB_SIZE, generate, make_tiny_model
from tests.fakes.torch_replica import TorchReplica
from worker.engine.engine import Row, StepPlan, StepResult, run_step
from worker.parallel.group import PeerLost
from worker.request import Sampling

COUNT = 10
BLOCK_TOKENS = 8
SPLITS = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2)]
WAYS = list(product((16, 512), (False, True)))
# Every split with every chunk size, and with and without a cached prefix.
PAIRS = [
    (split, (chunk, cached == bool(i % 2)))
    for i, split in enumerate(SPLITS)
    for chunk, cached in ((16, True), (512, False))
]
REST = [pair for pair in product(SPLITS, WAYS) if pair not in PAIRS]


@dataclass(frozen=True)
class Case:
    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_case(folder: Path, family: str, **changes: object) -> Case:
    make_tiny_model(folder, family, **{**NINE_HEADS, "num_hidden_layers": 4, **changes})
    draw = random.Random(5)
    prompts = [[draw.randrange(1, VOCAB_SIZE) for _ in range(n)] for n in (1, 9, 23, 40)]
    return Case(folder, prompts, [generate(folder, prompt, COUNT) for prompt in prompts])


@pytest.fixture(scope="module")
def nine(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a Llama of nine query and three key-value heads in four layers."""
    return make_case(tmp_path_factory.mktemp("nine"), "llama")


@pytest.fixture(scope="module")
def two_by_two(nine: Case) -> TorchReplica:
    return TorchReplica.load(nine.folder, tp=2, pp=2)


def streams(prompts: list[list[int]]) -> list[Stream]:
    """Give every prompt its own shuffled share of the pool of 64 blocks."""
    blocks = list(range(64))
    random.Random(2).shuffle(blocks)
    return [Stream(prompt, blocks[i * 8 : i * 8 + 8]) for i, prompt in enumerate(prompts)]


def outputs(replica: TorchReplica, case: Case, *, chunk: int, cached: bool) -> list[list[int]]:
    """Run all prompts in one batch; with `cached`, the longest one's blocks are there already."""
    together = streams(case.prompts)
    if cached:
        first = Stream(case.prompts[3], [*together[3].table[:4], 62, 63])
        step(replica, [first], chunk=64)
        together[3].computed = 4 * BLOCK_TOKENS
    run(replica, together, COUNT, chunk=chunk)
    return [stream.output for stream in together]


def check_split(case: Case, split: tuple[int, int], way: tuple[int, bool]) -> None:
    replica = TorchReplica.load(case.folder, tp=split[0], pp=split[1])
    assert outputs(replica, case, chunk=way[0], cached=way[1]) == case.expected
    replica.close()


def test_the_pairs_cover_every_two_of_split_chunk_and_cache() -> None:
    assert {(split, chunk) for split, (chunk, _) in PAIRS} == set(product(SPLITS, (16, 512)))
    assert {(split, cached) for split, (_, cached) in PAIRS} == set(product(SPLITS, (False, True)))
    assert {way for _, way in PAIRS} == set(WAYS)


@pytest.mark.parametrize(("split", "way"), PAIRS)
def test_splits_chunks_and_cached_prefixes_change_no_id(
    nine: Case, split: tuple[int, int], way: tuple[int, bool]
) -> None:
    check_split(nine, split, way)


@pytest.mark.long
@pytest.mark.parametrize(("split", "way"), REST)
def test_the_rest_of_the_matrix_changes_no_id(
    nine: Case, split: tuple[int, int], way: tuple[int, bool]
) -> None:
    check_split(nine, split, way)


@pytest.mark.parametrize("split", [(4, 1), (9, 1), (1, 4)])
def test_copied_key_heads_and_a_stage_for_each_layer_change_no_id(
    nine: Case, split: tuple[int, int]
) -> None:
    check_split(nine, split, (16, True))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2", {}),  # biases of queries, keys and values
        ("qwen3", {}),  # norms of each head
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 1]}),  # layers that are not alike
    ],
)
def test_other_models_of_the_family_change_no_id(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    check_split(make_case(tmp_path, family, **changes), (2, 2), (16, True))


def sampled(seed: int, table: list[int], prompt: list[int]) -> Stream:
    return Stream(prompt, table, Sampling(seed=seed, temperature=1.5, top_p=0.95, top_k=50))


def test_seeded_draws_are_the_same_alone_in_a_batch_of_32_and_on_two_ranks(nine: Case) -> None:
    seen = []
    for tp in (1, 2):
        replica = TorchReplica.load(nine.folder, tp=tp, kv_tokens=32 * 6 * BLOCK_TOKENS)
        alone = sampled(7, list(range(6)), nine.prompts[2])
        run(replica, [alone], COUNT)
        batch = [
            sampled(seed, list(range(6 * seed, 6 * seed + 6)), nine.prompts[2])
            for seed in range(32)
        ]
        run(replica, batch, COUNT, chunk=16)
        assert batch[7].output == alone.output
        seen.append([stream.output for stream in batch])
    assert seen[0] == seen[1]
    assert len({tuple(output) for output in seen[0]}) == 32


def score_plan(prompt: list[int]) -> StepPlan:
    """Draw greedily with alternatives after a prompt, and score its ids but the first."""
    sampling = Sampling(
        seed=0, temperature=0.0, logprobs=True, top_logprobs=3, prompt_logprobs=True
    )
    row = Row(1, array("I", prompt), 0, [0, 1, 2], True, 0, sampling)
    row.targets = array("I", prompt[1:])
    plain = Row(2, array("I", prompt[:3]), 0, [9], True, 0, GREEDY)
    return StepPlan(1, (plain, row))


@pytest.mark.parametrize(("tp", "pp"), [(3, 1), (2, 2)])
def test_logprobs_alternatives_and_prompt_scores_reach_every_rank(
    nine: Case, tp: int, pp: int
) -> None:
    plan = score_plan(nine.prompts[2])
    whole = run_step(TorchReplica.load(nine.folder), plan)
    split = run_step(TorchReplica.load(nine.folder, tp=tp, pp=pp), plan)
    assert split.ids == whole.ids
    assert split.logprobs[1] == pytest.approx(whole.logprobs[1], abs=1e-4)
    assert (split.tops.counts, split.tops.ids) == (whole.tops.counts, whole.tops.ids)
    ((theirs, their_tops),) = whole.prompt
    ((ours, our_tops),) = split.prompt
    assert len(ours) == len(nine.prompts[2]) - 1
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert our_tops.ids == their_tops.ids


def test_a_step_that_draws_nothing_gives_nothing_on_all_ranks(two_by_two: TorchReplica) -> None:
    row = Row(1, array("I", [5, 6, 7]), 0, [0], False, 0, GREEDY)
    assert run_step(two_by_two, StepPlan(1, (row,))) == StepResult([], [])


def test_greedy_ids_cost_one_small_exchange_and_no_logits(nine: Case) -> None:
    replica = TorchReplica.load(nine.folder, tp=2)
    group = replica.engines[0, 0]._group
    assert isinstance(group, ThreadGroup)
    before = group.calls
    step(replica, streams(nine.prompts))
    embedding, layers, draw = 1, 2 * 4, 1
    assert group.calls - before == embedding + layers + draw


def test_stages_take_the_next_steps_while_earlier_ones_are_under_way(
    nine: Case, two_by_two: TorchReplica
) -> None:
    first, second = streams(nine.prompts[2:])
    plans = [StepPlan(n, (one.row(n, 512),)) for n, one in enumerate((first, second))]
    for plan in plans:
        two_by_two.launch(plan)
    drawn = [two_by_two.collect().ids for _ in plans]
    assert drawn == [[nine.expected[2][0]], [nine.expected[3][0]]]


def test_ranks_that_compute_different_plans_are_noticed_before_they_mix_numbers(
    nine: Case,
) -> None:
    replica = TorchReplica.load(nine.folder, tp=2)
    row = streams(nine.prompts[1:2])[0].row(1, 512)
    calls = [
        replica._threads[0, rank].submit(
            replica.engines[0, rank].launch, StepPlan(1, (row,), digest=rank)
        )
        for rank in range(2)
    ]
    errors = [call.exception() for call in calls]
    assert any(isinstance(error, RankDesync) for error in errors)
    assert all(isinstance(error, RankDesync | PeerLost) for error in errors)


def test_a_byte_budget_counts_a_rank_s_own_heads_and_layers(nine: Case) -> None:
    per_head_and_layer = 2 * 8 * 4 * BLOCK_TOKENS  # key and value, 8 wide, float32
    replica = TorchReplica.load(
        nine.folder, tp=2, pp=2, kv_tokens=0, kv_bytes=40 * per_head_and_layer
    )
    # Two layers a stage; two of three key-value heads on the first rank.
    assert replica.info.kv_blocks == 10
