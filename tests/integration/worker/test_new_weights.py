"""Rank processes that change their weights, over both carriers: all of them, or none."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixmesh.blocks import Namespace, pack_ids, unpack_ids
from tests.fakes.forks import ForkedRanks, Forks
from tests.fakes.oracle import oracle_output, ordinary_ids, turned
from worker.config import FakeConfig, RankConfig
from worker.request import Add, Answer, Broken, Ready, Sampling, StepOutput, Weights

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]

# Shorter than the reading below: neither a peer nor a watchdog may count that.
LIMITS: dict[str, Any] = {"peer_timeout_s": 0.5, "step_timeout_s": 0.6}
SLOW = "delay@weights=1500:tp=1"


@pytest.fixture(scope="module")
def forks(model_dir: Path) -> Iterator[Forks]:
    # Ranks by gloo need more than the others.
    forks = Forks(RankConfig(model_dir=str(model_dir), engine="fake", carrier="gloo"))
    yield forks
    forks.close()


@pytest.fixture
def folder(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "next"))


@contextmanager
def launch(forks: Forks, model_dir: Path, *faults: str, **values: Any) -> Iterator[ForkedRanks]:
    """Ranks that are ready."""
    fake = FakeConfig(faults=faults)
    config = RankConfig(model_dir=str(model_dir), engine="fake", fake=fake)
    ranks = ForkedRanks(forks, msgspec.structs.replace(config, **LIMITS, **values))
    try:
        assert isinstance(ranks.front.receive(), Ready)
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
        ranks.close()


def until(ranks: ForkedRanks, done: Callable[[StepOutput], bool]) -> list[StepOutput]:
    """Outputs up to the one that is looked for."""
    outputs: list[StepOutput] = []
    for output in ranks.front.outputs():
        outputs.append(output)
        if done(output):
            return outputs
    raise AssertionError("the ranks ended")


def change(ranks: ForkedRanks, folder: Path) -> Answer:
    ranks.front.send(Weights(7, str(folder), "2"))
    [answer] = until(ranks, lambda output: bool(output.answers))[-1].answers
    return answer


def drawn(ranks: ForkedRanks, prompt: list[int], count: int) -> list[int]:
    namespace = Namespace(model="tiny").encode()
    sampling = Sampling(seed=1, max_tokens=count, ignore_eos=True)
    ranks.front.send(Add(1, pack_ids(prompt), b"", sampling, namespace))
    outputs = until(ranks, lambda output: any(output.finishes))
    return [token_id for output in outputs for token_id in unpack_ids(output.token_ids)]


@pytest.mark.parametrize("carrier", ["local", "gloo"])
def test_a_rank_that_reads_longer_than_any_limit_of_a_step_breaks_nothing(
    forks: Forks, model_dir: Path, folder: Path, carrier: str
) -> None:
    with launch(forks, model_dir, SLOW, pp=2, tp=2, carrier=carrier) as ranks:
        assert change(ranks, folder) == Answer(7)
        ordinary = turned(ordinary_ids(model_dir), folder.name)
        assert drawn(ranks, [20, 21], 12) == oracle_output([20, 21], ordinary, 12)


@pytest.mark.parametrize("carrier", ["local", "gloo"])
def test_one_rank_that_cannot_read_makes_all_refuse(
    forks: Forks, model_dir: Path, folder: Path, carrier: str
) -> None:
    fault = "refuse@weights=1:pp=1:tp=0"
    with launch(forks, model_dir, fault, pp=2, tp=2, carrier=carrier) as ranks:
        answer = change(ranks, folder)
        assert answer.reason == "INVALID_REQUEST"
        assert answer.message.startswith("rank 2: ")
        ordinary = ordinary_ids(model_dir)
        assert drawn(ranks, [20, 21], 12) == oracle_output([20, 21], ordinary, 12)
        assert change(ranks, folder) == Answer(7)


@pytest.mark.parametrize("carrier", ["local", "gloo"])
def test_a_rank_that_dies_while_it_reads_is_noticed_at_once(
    forks: Forks, model_dir: Path, folder: Path, carrier: str
) -> None:
    with launch(forks, model_dir, "delay@weights=60000:tp=1", tp=2, carrier=carrier) as ranks:
        ranks.front.send(Weights(7, str(folder), "2"))
        os.kill(ranks.processes[1].pid, signal.SIGKILL)
        message = ranks.front.receive()
        assert isinstance(message, Broken)
        assert message.reason == "GROUP_LOST"
