"""The fake engine: exact, through the block table, at its pace, with its faults."""

import math
import time
from array import array
from pathlib import Path

import pytest

from radixmesh.errors import InvalidRequest
from tests.fakes.oracle import oracle_next, oracle_output, ordinary_ids
from tests.fakes.plans import reserved
from worker.config import FakeConfig, RankConfig
from worker.engine.build import build_engine
from worker.engine.engine import Row, StepPlan, run_step
from worker.engine.fake import FakeEngine
from worker.engine.faults import parse_faults
from worker.request import Sampling


def engine_of(model_dir: Path, **fake: object) -> FakeEngine:
    config = RankConfig(
        model_dir=str(model_dir),
        engine="fake",
        block_tokens=4,
        fake=FakeConfig(**{"kv_blocks": 16, **fake}),  # type: ignore[arg-type]
    )
    return reserved(FakeEngine.load(config))


def row(
    ids: list[int],
    blocks: list[int],
    *,
    start: int = 0,
    sampled: bool = True,
    position: int = 0,
    banned: tuple[int, ...] = (),
    sampling: Sampling | None = None,
) -> Row:
    return Row(
        request_id=1,
        ids=array("I", ids),
        start=start,
        blocks=blocks,
        sampled=sampled,
        output_position=position,
        sampling=sampling or Sampling(seed=1),
        banned=banned,
    )


@pytest.mark.parametrize("tokens", [10**14, 10**18, 2**63 - 1])
def test_a_pool_for_which_there_is_no_memory_is_refused(model_dir: Path, tokens: int) -> None:
    config = RankConfig(model_dir=str(model_dir), engine="fake", kv_tokens=tokens)
    with pytest.raises(InvalidRequest, match="no memory for the states"):
        reserved(FakeEngine.load(config))


def test_one_id_swapped_lost_or_doubled_changes_what_follows(model_dir: Path) -> None:
    ordinary = ordinary_ids(model_dir)
    ids = list(range(20, 30))
    right = oracle_output(ids, ordinary, 8)
    for wrong in ([*ids[:4], 25, 24, *ids[6:]], ids[1:], [20, *ids]):
        assert oracle_output(wrong, ordinary, 8) != right


def test_it_knows_the_model_without_its_libraries(model_dir: Path) -> None:
    info = engine_of(model_dir).info
    assert (info.block_tokens, info.kv_blocks, info.max_model_len) == (4, 16, 4096)
    assert info.vocab_size == 1000
    assert 1 in info.eos_ids


def test_it_draws_no_special_ids(model_dir: Path) -> None:
    ordinary = ordinary_ids(model_dir)
    assert not {0, 1, 2, 3} & set(ordinary)
    assert set(oracle_output([5], ordinary, 300)) <= set(ordinary)


def test_chunks_and_decoding_give_what_one_prefill_gives(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    ids = list(range(20, 31))
    first = row(ids[:5], [7, 2], sampled=False)
    assert run_step(engine, StepPlan(0, (first,))).ids == []
    second = row(ids[5:], [7, 2, 9], start=5)
    assert run_step(engine, StepPlan(1, (second,))).ids == [
        oracle_next(ids, ordinary_ids(model_dir))
    ]


def test_a_wrong_block_gives_wrong_ids(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    ids = list(range(20, 31))
    run_step(engine, StepPlan(0, (row(ids[:8], [7, 2], sampled=False),)))
    right = run_step(engine, StepPlan(1, (row(ids[8:], [7, 2, 3], start=8),))).ids
    wrong = run_step(engine, StepPlan(2, (row(ids[8:], [7, 5, 3], start=8),))).ids
    assert right == [oracle_next(ids, ordinary_ids(model_dir))] != wrong


def test_a_banned_id_is_not_drawn(model_dir: Path) -> None:
    expected = oracle_next([20, 21], ordinary_ids(model_dir))
    drawn = run_step(
        engine_of(model_dir), StepPlan(0, (row([20, 21], [0], banned=(expected,)),))
    ).ids
    assert drawn != [expected]


def test_something_is_drawn_even_when_all_ordinary_ids_are_banned(model_dir: Path) -> None:
    banned = tuple(ordinary_ids(model_dir))
    drawn = run_step(engine_of(model_dir), StepPlan(0, (row([20], [0], banned=banned),))).ids
    assert drawn[0] not in banned


@pytest.mark.parametrize(
    ("position", "ignored", "banned", "ends"),
    [(2, False, (), False), (3, False, (), True), (9, False, (), True), (3, True, (), False)],
)
def test_an_end_follows_after_so_many_ids(
    model_dir: Path, position: int, ignored: bool, banned: tuple[int, ...], ends: bool
) -> None:
    engine = engine_of(model_dir, eos_after=3)
    sampling = Sampling(seed=1, ignore_eos=ignored)
    one = row([20], [0], position=position, sampling=sampling, banned=banned)
    assert (run_step(engine, StepPlan(0, (one,))).ids[0] in engine.info.eos_ids) is ends


def test_no_banned_end_follows(model_dir: Path) -> None:
    engine = engine_of(model_dir, eos_after=3)
    one = row([20], [0], position=5, banned=engine.info.eos_ids)
    assert run_step(engine, StepPlan(0, (one,))).ids == [oracle_next([20], ordinary_ids(model_dir))]


def test_logprobs_are_the_same_every_time_and_nan_where_not_asked(model_dir: Path) -> None:
    rows = (row([20], [0], sampling=Sampling(seed=1, logprobs=True)), row([20], [1]))
    first = run_step(engine_of(model_dir), StepPlan(0, rows)).logprobs
    second = run_step(engine_of(model_dir), StepPlan(0, rows)).logprobs
    assert first[0] == second[0] <= 0
    assert math.isnan(first[1])


def test_the_pace_is_kept(model_dir: Path) -> None:
    engine = engine_of(model_dir, prefill_tokens_per_s=1000.0, decode_ms=20.0)
    began = time.perf_counter()
    run_step(engine, StepPlan(0, (row(list(range(20, 60)), list(range(10))),)))
    prefilled = time.perf_counter()
    run_step(engine, StepPlan(1, (row([60], list(range(11)), start=40, position=1),)))
    decoded = time.perf_counter()
    assert prefilled - began >= 0.04
    assert decoded - prefilled >= 0.02


def test_a_scripted_exception_is_raised_from_its_step_on(model_dir: Path) -> None:
    engine = engine_of(model_dir, faults=("raise@step=5",))
    run_step(engine, StepPlan(4, (row([20], [0]),)))
    run_step(engine, StepPlan(5, ()))
    with pytest.raises(RuntimeError, match="scripted"):
        run_step(engine, StepPlan(6, (row([20], [0]),)))


def test_a_poisoned_id_breaks_it_wherever_it_stands(model_dir: Path) -> None:
    engine = engine_of(model_dir, faults=("raise@prompt-contains=77",))
    run_step(engine, StepPlan(0, (row([20, 21], [0]),)))
    with pytest.raises(RuntimeError, match="scripted"):
        run_step(engine, StepPlan(1, (row([20, 77, 21], [0]),)))


def test_a_desync_changes_this_rank_s_ids_only_there(model_dir: Path) -> None:
    engine = engine_of(model_dir, faults=("desync@step=1:tp=0",))
    right = run_step(engine, StepPlan(0, (row([20], [0]),))).ids
    assert run_step(engine, StepPlan(1, (row([20], [0]),))).ids != right


def test_faults_choose_ranks() -> None:
    config = RankConfig(model_dir="", dp_rank=1, pp_rank=0, tp_rank=2)
    scripts = ["exit@step=1", "exit@step=2:tp=2:dp=1", "hang@step=3:tp=1", "hang@step=4:pp=1"]
    assert [fault.number for fault in parse_faults(scripts, config)] == [1, 2]


@pytest.mark.parametrize("script", ["", "explode@step=1", "exit@step", "exit@step=x", "exit"])
def test_a_fault_that_cannot_be_read_is_refused_with_the_flag_s_name(script: str) -> None:
    with pytest.raises(InvalidRequest, match="--fake-faults"):
        parse_faults([script], RankConfig(model_dir=""))


def test_a_missing_model_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json"):
        engine_of(tmp_path)


def test_an_engine_nobody_has_is_refused_with_the_flag_s_name(model_dir: Path) -> None:
    with pytest.raises(InvalidRequest, match="--engine"):
        build_engine(RankConfig(model_dir=str(model_dir), engine="abacus"))
