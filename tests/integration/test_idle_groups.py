"""Groups that had nothing to do for longer than any deadline between ranks: still the same ones."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.model_dir import VOCAB_SIZE, make_model_dir
from tests.fakes.rank_processes import ranks_of
from tests.fakes.tiny_models import NINE_HEADS, make_tiny_model
from worker import Engine, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

IDLE_S = 3.0
# No probe comes while the group is idle, and every deadline is far below that time.
SHORT: dict[str, Any] = {"probe_interval_s": 60, "peer_timeout_s": 0.5, "step_timeout_s": 1.5}
PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nine")
    make_model_dir(folder)
    return make_tiny_model(folder, "llama", vocab_size=VOCAB_SIZE, **NINE_HEADS)


@pytest.mark.parametrize(
    "flags",
    [
        {"engine": "fake", "pp": 2, "tp": 2, "carrier": "local"},
        {"engine": "fake", "pp": 2, "tp": 2, "carrier": "gloo"},
        {"tp": 2, "carrier": "local", "tensors": "shm"},
        {"tp": 2, "carrier": "gloo", "tensors": "gloo"},
        pytest.param({"pp": 2, "carrier": "local"}, marks=pytest.mark.long),
    ],
    ids=lambda flags: "-".join(str(value) for value in flags.values()),
)
def test_the_same_ranks_answer_after_a_rest_that_costs_nothing(
    model: Path, flags: dict[str, Any]
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with Engine(model, dtype="float32", kv_tokens=1024, threads=1, **SHORT, **flags) as engine:
        [before] = engine.generate([PROMPT], greedy)
        ranks = ranks_of(os.getpid())
        used = [process.cpu_times() for process in ranks]
        time.sleep(IDLE_S)  # the passing of time is what is tried here
        for process, then in zip(ranks, used, strict=True):
            now = process.cpu_times()
            assert now.user + now.system - then.user - then.system <= 0.01 * IDLE_S
        [after] = engine.generate([PROMPT], greedy)
        assert after.ids == before.ids
        assert set(ranks_of(os.getpid())) == set(ranks), "none was replaced"
