"""The library operated: pauses, new weights, replicas that are never well; and what is public."""

import asyncio
import inspect
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import xxhash

import worker
from radixmesh import errors
from radixmesh.settings import child_environment
from tests.fakes.library import fake_engine, kill, my_ranks
from tests.fakes.oracle import oracle_next, oracle_output, ordinary_ids
from worker import Engine, Piece, SamplingParams

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def ordinary(model_dir: Path) -> list[int]:
    return ordinary_ids(model_dir)


@pytest.fixture(scope="module")
def other_weights(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path_factory.mktemp("other") / "step-2"))


def turned(ordinary: Sequence[int], folder: Path) -> list[int]:
    """The vocabulary as the fake engine draws from it with other weights."""
    turn = xxhash.xxh3_64(folder.name.encode()).intdigest() % len(ordinary)
    return [*ordinary[turn:], *ordinary[:turn]]


def test_the_weights_of_every_output_are_named(
    model_dir: Path, ordinary: list[int], other_weights: Path
) -> None:
    prompts = [[at + 4, 5] for at in range(6)]
    sampling = SamplingParams(max_tokens=8)
    with fake_engine(model_dir, dp=2, tp=2, weight_version="step-1") as engine:
        for output in engine.generate(prompts, sampling):
            assert output.ids == oracle_output(output.prompt_ids, ordinary, 8)
            assert output.weight_version == "step-1"
        engine.update_weights(other_weights, "step-2")
        assert engine.info.weight_version == "step-2"
        new = turned(ordinary, other_weights)
        for output in engine.generate(prompts, sampling):
            assert output.ids == oracle_output(output.prompt_ids, new, 8)
            assert output.weight_version == "step-2"
            assert output.cached_tokens == 0
        # A replica that comes back has them too.
        kill("dp=0 pp=0 tp=1")
        for output in engine.generate(prompts * 4, sampling):
            assert output.ids == oracle_output(output.prompt_ids, new, 8)
            assert output.weight_version == "step-2"


@pytest.mark.parametrize("version", [5, None, b"step-2", "\ud800"])
def test_a_version_that_is_no_text_is_refused_and_nothing_happens(
    model_dir: Path, ordinary: list[int], other_weights: Path, version: Any
) -> None:
    with fake_engine(model_dir, weight_version="step-1") as engine:
        ranks = {rank.pid for rank in my_ranks()}
        with pytest.raises(errors.InvalidRequest, match="version: expected a text"):
            engine.update_weights(other_weights, version)
        [output] = engine.generate([[5, 6]], SamplingParams(max_tokens=4))
        assert output.ids == oracle_output([5, 6], ordinary, 4)
        assert output.weight_version == engine.info.weight_version == "step-1"
        assert {rank.pid for rank in my_ranks()} == ranks


@pytest.mark.parametrize(("version", "said"), [("", "must not be empty"), ("step-1", "is in use")])
def test_a_version_that_tells_nothing_apart_is_refused(
    model_dir: Path, other_weights: Path, version: str, said: str
) -> None:
    with fake_engine(model_dir, weight_version="step-1") as engine:
        with pytest.raises(errors.InvalidRequest, match=said):
            engine.update_weights(other_weights, version)
        [output] = engine.generate([[5, 6]], SamplingParams(max_tokens=4))
        assert output.weight_version == engine.info.weight_version == "step-1"


async def test_an_output_under_way_goes_on_with_the_new_weights(
    model_dir: Path, ordinary: list[int], other_weights: Path
) -> None:
    with fake_engine(model_dir, fake_decode_ms=10) as engine:
        pieces: list[Piece] = []
        async for piece in engine.stream([5, 6], SamplingParams(max_tokens=60)):
            if len(pieces) == 3:
                await asyncio.to_thread(engine.update_weights, other_weights, "step-2")
            pieces.append(piece)
    ids = [each for piece in pieces for each in piece.ids]
    versions = [piece.weight_version for piece in pieces for _ in piece.ids]
    assert versions == sorted(versions)
    assert (versions[0], versions[-1], len(ids)) == ("", "step-2", 60)
    new = turned(ordinary, other_weights)
    of_new = [
        each == oracle_next([5, 6, *ids[:at]], new) != oracle_next([5, 6, *ids[:at]], ordinary)
        for at, each in enumerate(ids)
    ]
    assert of_new == sorted(of_new)
    for at, each in enumerate(ids):
        assert each == oracle_next([5, 6, *ids[:at]], new if of_new[at] else ordinary)
    assert versions.index("step-2") == of_new.index(True)


def test_weights_that_do_not_fit_change_nothing(
    model_dir: Path, ordinary: list[int], tmp_path: Path
) -> None:
    with fake_engine(model_dir, dp=2, weight_version="step-1") as engine:
        for folder in (tmp_path, tmp_path / "nothing"):
            with pytest.raises(errors.InvalidRequest):
                engine.update_weights(folder, "step-2")
        for output in engine.generate([[5], [6]], SamplingParams(max_tokens=8)):
            assert output.ids == oracle_output(output.prompt_ids, ordinary, 8)
            assert output.weight_version == "step-1"


async def test_nothing_is_computed_during_a_pause_and_nothing_is_lost_by_it(
    model_dir: Path, ordinary: list[int]
) -> None:
    with fake_engine(model_dir, dp=2, fake_decode_ms=5) as engine:
        ids: list[int] = []
        begun = asyncio.Event()

        async def listen() -> None:
            async for piece in engine.stream([5], SamplingParams(max_tokens=60)):
                ids.extend(piece.ids)
                begun.set()

        listening = asyncio.create_task(listen())
        await begun.wait()
        await asyncio.to_thread(engine.pause)
        # What a step said before the pause is on its way; a flush comes after it.
        await asyncio.to_thread(engine.flush_cache)
        known = len(ids)
        later = asyncio.create_task(engine.generate_async([[6]], SamplingParams(max_tokens=3)))
        for _ in range(20):
            await asyncio.to_thread(engine.flush_cache)
        assert (len(ids), listening.done(), later.done()) == (known, False, False)
        await asyncio.to_thread(engine.resume)
        await listening
        assert ids == oracle_output([5], ordinary, 60)
        assert (await later)[0].ids == oracle_output([6], ordinary, 3)


def test_a_rank_that_dies_in_a_pause_comes_back_paused(
    model_dir: Path, ordinary: list[int]
) -> None:
    with fake_engine(model_dir) as engine:
        engine.pause()
        kill("dp=0")
        engine.resume()
        [output] = engine.generate([[6]], SamplingParams(max_tokens=3))
        assert output.ids == oracle_output([6], ordinary, 3)


def test_replicas_that_are_never_well_end_the_engine_with_a_type(model_dir: Path) -> None:
    with pytest.raises(errors.GroupLost, match="failed 3 times"):
        Engine(model_dir, engine="fake", fake_faults=["exit@step=0"], max_failures=3)
    assert my_ranks() == []


def test_an_engine_that_can_not_be_kept_alive_says_so_from_then_on(model_dir: Path) -> None:
    faults = ["exit@prompt-contains=77"]
    with fake_engine(model_dir, fake_faults=faults, max_failures=2) as engine:
        for prompt in ([77], [5]):
            with pytest.raises(errors.GroupLost, match="failed 2 times"):
                engine.generate([prompt])
        assert my_ranks() == []


# What is public.


def test_the_example_runs(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = inspect.getdoc(Engine) or ""
    lines = [line for line in told.splitlines() if line.startswith("    ")]
    example = textwrap.dedent("\n".join(lines))
    assert '"smollm2", dp=2' in example
    example = example.replace('"smollm2", dp=2', f'{str(model_dir)!r}, dp=2, engine="fake"')
    exec(example, {"Engine": Engine, "SamplingParams": SamplingParams})
    assert len(capsys.readouterr().out) > 1


def test_what_is_public_is_documented_and_comes_late() -> None:
    for name in worker.__all__:
        assert inspect.getdoc(getattr(worker, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'engines'"):
        worker.engines  # type: ignore[attr-defined]  # noqa: B018
    light = "import sys, worker.engine.fake; sys.exit('worker.library' in sys.modules)"
    subprocess.run([sys.executable, "-c", light], check=True, env=child_environment())


def test_both_flavours_of_generate_have_the_same_parameters() -> None:
    blocking = inspect.signature(Engine.generate)
    assert blocking == inspect.signature(Engine.generate_async)
