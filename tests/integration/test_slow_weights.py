"""New weights that take long to read: a group keeps its ranks for them, but not for ever."""

import shutil
from pathlib import Path

import pytest

from radixmesh.errors import GroupLost
from tests.fakes.library import fake_engine, my_ranks
from tests.fakes.oracle import oracle_output, ordinary_ids, turned
from worker import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture
def other(model_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_dir, tmp_path / "next"))


def test_ranks_that_read_longer_than_any_silence_may_last_are_kept(
    model_dir: Path, other: Path
) -> None:
    with fake_engine(
        model_dir,
        tp=2,
        fake_faults=["delay@weights=3500:tp=1"],
        step_timeout_s=0.5,  # and 2 s more until a silent replica is given up
        peer_timeout_s=0.5,
        probe_interval_s=0.1,
        probe_timeout_s=0.5,
    ) as engine:
        pids = {rank.pid for rank in my_ranks()}
        engine.update_weights(other, "2")
        assert {rank.pid for rank in my_ranks()} == pids
        [output] = engine.generate([[20, 21]], SAMPLING)
        new = turned(ordinary_ids(model_dir), other.name)
        assert output.ids == oracle_output([20, 21], new, 8)
        assert {rank.pid for rank in my_ranks()} == pids


def test_ranks_that_never_end_reading_are_given_up_as_in_a_start(
    model_dir: Path, other: Path
) -> None:
    with fake_engine(
        model_dir, tp=2, fake_faults=["delay@weights=3600000:tp=1"], startup_timeout_s=8
    ) as engine:
        with pytest.raises(GroupLost, match="has read new weights for"):
            engine.update_weights(other, "2")
        [output] = engine.generate([[20, 21]], SAMPLING)
        assert output.ids == oracle_output([20, 21], ordinary_ids(model_dir), 8)
