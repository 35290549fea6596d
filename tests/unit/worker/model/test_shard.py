"""A rank holds its shard of a model and reads no more; what cannot be split is refused.

Run: pytest tests/unit/worker/model/test_shard.py
"""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixmesh.errors import InvalidRequest, NotSupported
from tests.fakes.tiny_models import NINE_HEADS, VOCAB_SIZE, make_config, make_tiny_model
from worker.engine.attention import ATTENTION, register
from worker.model.checkpoint import Checkpoint, Part
from worker.model.load import LoadedModel, load_model
from worker.model.shard import build_shard, read_parts
from worker.parallel.split import Seat

WIDTH, INNER, HEAD = 72, 96, 8
FLOAT = 4


def load(folder: Path, **seat: int) -> LoadedModel:
    register()
    return load_model(
        folder, attention=ATTENTION, dtype="float32", device_index=0, seat=Seat(**seat)
    )


def shapes(model: LoadedModel) -> dict[str, tuple[int, ...]]:
    named = model.module.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return nine query heads, three key-value heads, three layers, in one file."""
    return make_tiny_model(tmp_path_factory.mktemp("llama"), "llama", **NINE_HEADS)


def test_the_parts_of_a_stage_have_the_shapes_of_their_heads(llama: Path) -> None:
    first, second = (shapes(load(llama, tp=2, tp_rank=rank)) for rank in range(2))
    layer = "model.layers.2.self_attn"
    assert first[f"{layer}.q_proj.weight"] == (6 * HEAD, WIDTH)
    assert second[f"{layer}.q_proj.weight"] == (3 * HEAD, WIDTH)
    assert first[f"{layer}.k_proj.weight"] == (2 * HEAD, WIDTH)
    assert second[f"{layer}.v_proj.weight"] == (HEAD, WIDTH)
    assert first[f"{layer}.o_proj.weight"] == (WIDTH, 6 * HEAD)
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weight = f"model.layers.0.mlp.{name}.weight"
        assert first[weight][dim] + second[weight][dim] == INNER
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert first[name][0] + second[name][0] == VOCAB_SIZE


def test_a_stage_has_its_own_layers_and_the_ends_only_where_they_belong(llama: Path) -> None:
    first, last = load(llama, pp=2, pp_rank=0), load(llama, pp=2, pp_rank=1)
    assert (first.layers, last.layers) == (2, 1)
    assert "model.embed_tokens.weight" in shapes(first).keys() - shapes(last).keys()
    assert {"model.norm.weight", "lm_head.weight"} <= shapes(last).keys() - shapes(first).keys()
    stored = load_file(llama / "model.safetensors")
    third = last.module.model.layers[0].mlp.up_proj.weight
    assert torch.equal(third, stored["model.layers.2.mlp.up_proj.weight"])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 3), (2, 2)])
def test_a_rank_reads_its_share_and_all_ranks_together_read_the_model_once(
    llama: Path, tp: int, pp: int
) -> None:
    register()
    config = make_config("llama", **NINE_HEADS)
    read = 0
    for stage, rank in product(range(pp), range(tp)):
        seat = Seat(tp=tp, tp_rank=rank, pp=pp, pp_rank=stage)
        _, _, parts = build_shard(config, seat, ATTENTION)
        tensors, bytes_read = read_parts(llama, parts, torch.float32)
        assert bytes_read == sum(tensor.nbytes for tensor in tensors.values())
        read += bytes_read
    stored = sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())
    norms = 2 * 3 + 1  # two to a layer and the last; every rank of a stage has them
    assert read == stored + (tp - 1) * norms * WIDTH * FLOAT


def test_building_takes_no_memory_for_weights(llama: Path) -> None:
    module, _, _ = build_shard(make_config("llama", **NINE_HEADS), Seat(tp=2), ATTENTION)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not any(buffer.is_meta for buffer in module.buffers())


def test_four_ranks_hold_three_key_heads_one_of_them_twice(llama: Path) -> None:
    ranks = [load(llama, tp=4, tp_rank=rank) for rank in range(4)]
    keys = [model.module.model.layers[0].self_attn.k_proj.weight for model in ranks]
    assert all(key.shape == (HEAD, WIDTH) for key in keys)
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[1], keys[2])


def test_a_model_in_several_files_gives_the_same_share(tmp_path: Path, llama: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", max_shard_size="50KB", **NINE_HEADS)
    assert len(list(folder.glob("*.safetensors"))) > 2
    split, whole = (load(path, tp=2, tp_rank=1, pp=2, pp_rank=1) for path in (folder, llama))
    for ours, theirs in zip(split.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused_and_not_read_as_numbers(
    tmp_path: Path, llama: Path, kind: torch.dtype
) -> None:
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(kind)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(InvalidRequest, match=f"{name} in .* is .*quantized"):
        load(tmp_path, tp=2)


def test_a_tied_head_shares_the_embedding_s_memory_on_one_stage(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    only = load(folder, tp=2, tp_rank=1).module
    assert only.lm_head.weight is only.model.embed_tokens.weight
    first, last = (load(folder, pp=2, pp_rank=stage).module for stage in range(2))
    assert torch.equal(last.lm_head.weight, first.model.embed_tokens.weight)


def test_weights_are_converted_to_the_dtype_asked_for(llama: Path) -> None:
    register()
    seat = Seat(tp=2)
    model = load_model(llama, attention=ATTENTION, dtype="bfloat16", device_index=0, seat=seat)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    assert model.module.model.rotary_emb.inv_freq.dtype == torch.float32


def test_end_ids_come_from_the_generation_config(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", eos_token_id=5)
    assert load(folder, tp=2).eos_ids == (5,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load(folder, tp=2).eos_ids == (7, 8)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gpt2", {}, "GPT2LMHeadModel: it has no model"),
        ("mixtral", {}, r"layers\.0\.mlp \(MixtralSparseMoeBlock\)"),
        ("deepseek_v3", {}, r"layers\.0\.self_attn \(DeepseekV3Attention\)"),
        ("phi3", {"sliding_window": None}, r"layers\.0\.self_attn \(Phi3Attention\)"),
        # More norms to a layer.
        ("olmo2", {}, r"layers\.0 \(Olmo2DecoderLayer\)"),
        ("hunyuan_v1_dense", {}, "key_layernorm"),
        # The embedding is scaled.
        ("gemma3_text", {"sliding_window": 256}, "Gemma3TextScaledWordEmbedding"),
    ],
)
def test_other_architectures_are_refused_with_the_module_that_is_unknown(
    tmp_path: Path, family: str, changes: dict[str, Any], named: str
) -> None:
    folder = make_tiny_model(tmp_path, family, **changes)
    with pytest.raises(NotSupported, match=named):
        load(folder, tp=2, pp=2)


def test_embeddings_that_are_scaled_between_the_stages_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "granite", embedding_multiplier=3.0)
    with pytest.raises(NotSupported, match="GraniteModel scales"):
        load(folder, pp=2)
    assert load(folder, tp=2).layers == 3


@pytest.mark.parametrize(("seat", "named"), [({"tp": 10}, "--tp 10"), ({"pp": 4}, "--pp 4")])
def test_more_ranks_than_parts_are_refused_by_the_flag(
    llama: Path, seat: dict[str, int], named: str
) -> None:
    with pytest.raises(NotSupported, match=named):
        load(llama, **seat)


def test_a_missing_weight_is_refused_by_the_rank_that_needs_it(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"layers\.1\.mlp\.up_proj"):
        load(folder, pp=2, pp_rank=0)
    assert load(folder, pp=2, pp_rank=1).layers == 1


def test_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match=r"norm\.weight .*\(7,\)"):
        load(folder, tp=2)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, None])
def test_files_that_cannot_be_read_are_refused(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(InvalidRequest, match="cannot load"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", '{"weight_map": {"a": "absent.safetensors"}}'])
def test_a_broken_index_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(InvalidRequest, match="cannot load"):
        Checkpoint(tmp_path)


def test_a_part_is_found_under_the_first_of_its_names(tmp_path: Path) -> None:
    save_file({"b": torch.arange(6.0).reshape(3, 2)}, tmp_path / "model.safetensors")
    part = Part(names=("a", "b"), shape=(3, 2), dim=0, span=range(1, 3))
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read(part, torch.float32).tolist() == [[2, 3], [4, 5]]
        assert checkpoint.bytes_read == 4 * FLOAT
