"""Weights are changed in a running engine on all ranks, or on none.

Run: pytest tests/unit/worker/engine/test_torch_weights.py
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from radixmesh.errors import InvalidRequest
from tests.fakes.plans import Stream, run
from tests.fakes.tiny_models import NINE_HEADS, generate, make_tiny_model
from tests.fakes.torch_replica import TorchReplica

PROMPT = [3, 141, 59, 26, 53, 58, 97, 93, 23, 84]
COUNT = 8
SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]


def make(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    return make_tiny_model(folder, "llama", seed=seed, **{**NINE_HEADS, **changes})


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("new"), seed=1)


def output(replica: TorchReplica) -> list[int]:
    stream = Stream(PROMPT, [0, 1, 2])
    run(replica, [stream], COUNT)
    return stream.output


@pytest.mark.parametrize(("tp", "pp"), SPLITS)
def test_outputs_are_those_of_the_new_weights(old: Path, new: Path, tp: int, pp: int) -> None:
    replica = TorchReplica.load(old, tp=tp, pp=pp)
    assert output(replica) == generate(old, PROMPT, COUNT)
    replica.update_weights(new)
    assert output(replica) == generate(new, PROMPT, COUNT) != generate(old, PROMPT, COUNT)
    replica.update_weights(old)
    assert output(replica) == generate(old, PROMPT, COUNT)


def test_a_head_that_shares_the_embedding_changes_with_it(tmp_path: Path) -> None:
    old, new = (
        make(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in range(2)
    )
    replica = TorchReplica.load(old, tp=2, pp=2)
    replica.update_weights(new)
    assert output(replica) == generate(new, PROMPT, COUNT)


@pytest.mark.parametrize(("tp", "pp"), SPLITS)
def test_one_rank_that_cannot_keeps_all_from_changing(
    old: Path, new: Path, tmp_path: Path, tp: int, pp: int
) -> None:
    # Of the last layer, so that only the last stage misses it.
    shutil.copytree(new, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    replica = TorchReplica.load(old, tp=tp, pp=pp)
    with pytest.raises(InvalidRequest, match="lacks weights"):
        replica.update_weights(tmp_path)
    assert output(replica) == generate(old, PROMPT, COUNT)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"intermediate_size": 112}, "intermediate_size is 112, here 96"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters"),
        ({"num_hidden_layers": 2}, "num_hidden_layers"),
    ],
)
def test_another_model_is_refused_by_what_differs(
    old: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    replica = TorchReplica.load(old, tp=2)
    with pytest.raises(InvalidRequest, match=named):
        replica.update_weights(make(tmp_path, **changes))
    assert output(replica) == generate(old, PROMPT, COUNT)


def test_a_directory_without_a_model_is_refused(old: Path, tmp_path: Path) -> None:
    replica = TorchReplica.load(old)
    with pytest.raises(InvalidRequest, match="config"):
        replica.update_weights(tmp_path)
    assert output(replica) == generate(old, PROMPT, COUNT)
