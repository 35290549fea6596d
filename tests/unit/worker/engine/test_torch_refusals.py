"""Models that the engine would compute wrongly, and settings that fit nothing, are refused.

Run: pytest tests/unit/worker/engine/test_torch_refusals.py
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixmesh.errors import InvalidRequest, MeshError, NotSupported
from tests.fakes.plans import reserved
from tests.fakes.tiny_models import make_config, make_tiny_model
from worker.config import RankConfig
from worker.engine.attention import ATTENTION
from worker.engine.torch_engine import TorchEngine
from worker.model.load import load_model
from worker.model.support import check_config

FLOAT32: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_tokens": 64}


def load(folder: Path, **changes: Any) -> TorchEngine:
    return reserved(TorchEngine.load(RankConfig(model_dir=str(folder), **(FLOAT32 | changes))))


def test_a_sliding_window_is_refused_with_the_limit_that_would_do(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "mistral", sliding_window=32)
    with pytest.raises(NotSupported, match="--max-model-len 32"):
        load(folder)
    assert load(folder, max_model_len=32).info.max_model_len == 32


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "8"),
        ("gemma2", {}, "."),
        ("gemma2", {"sliding_window": 256}, "softcapping"),
        ("gpt_oss", {"sliding_window": 256}, "s_aux"),
        ("mamba", {}, "."),
        ("bloom", {}, "."),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "conv"),
    ],
)
def test_attention_that_the_engine_does_not_do_is_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    folder = make_tiny_model(tmp_path, family, **changes)
    with pytest.raises(MeshError, match=named):
        load(folder, max_model_len=256)


def test_a_window_that_no_layer_uses_is_none() -> None:
    config = make_config("qwen2", use_sliding_window=False, sliding_window=8)
    check_config(config, 256)


def test_positions_beyond_a_longrope_limit_are_refused() -> None:
    factors = [1.0] * 4
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
    }
    config = make_config(
        "phi3",
        rope_parameters=rope,
        original_max_position_embeddings=128,
        sliding_window=None,
    )
    check_config(config, 128)
    with pytest.raises(NotSupported, match="--max-model-len 128"):
        check_config(config, 129)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"dtype": "int8"}, InvalidRequest, "--dtype"),
        ({"max_model_len": 257}, InvalidRequest, "--max-model-len"),
        ({"kv_tokens": 0, "kv_bytes": 10}, InvalidRequest, "--kv-bytes"),
    ],
)
def test_a_wrong_setting_is_refused_by_the_name_of_its_flag(
    llama: Path, changes: dict[str, Any], error: type[MeshError], named: str
) -> None:
    with pytest.raises(error, match=named):
        load(llama, **changes)


def test_a_byte_budget_decides_how_many_blocks_there_are(llama: Path) -> None:
    # 3 layers x (key + value) x 2 heads x 8 wide x 4 bytes, 16 ids to a block.
    per_block = 3 * 2 * 2 * 8 * 4 * 16
    engine = load(llama, kv_tokens=0, kv_bytes=10 * per_block + 1)
    assert engine.info.kv_blocks == 10


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="config"):
        load(tmp_path)


def test_a_directory_without_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llama / "config.json").read_text())
    with pytest.raises(InvalidRequest, match="cannot load"):
        load(tmp_path)


def test_a_missing_weight_is_refused_and_not_invented(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj"):
        load(folder)


def test_end_ids_come_from_the_generation_config_before_the_config(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", eos_token_id=5)
    assert load(folder).info.eos_ids == (5,)
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": [7, 8]}))
    assert load(folder).info.eos_ids == (7, 8)
    (folder / "generation_config.json").unlink()
    assert load(folder).info.eos_ids == (5,)


def test_a_model_that_is_called_without_pages_says_so(llama: Path) -> None:
    load(llama)  # registers the attention
    model = load_model(llama, attention=ATTENTION, dtype="float32", device_index=0)
    with pytest.raises(NotSupported, match="paged"):
        model.module(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.parametrize("tokens", [10**12, 10**17])
def test_a_cache_for_which_there_is_no_memory_is_refused(tmp_path: Path, tokens: int) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    with pytest.raises(InvalidRequest, match="no memory for the KV"):
        load(folder, kv_tokens=tokens)
