"""Makes one rank's shard of a model: its layers, cut, and nothing else in memory.

transformers' own modules are built without weights, cut, and then filled with what the
rank needs from the files. Knows the Llama family's module names; knows no KV cache.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from radixmesh.errors import InvalidRequest, NotSupported
from worker.model.checkpoint import Checkpoint, Part
from worker.model.family import head_dim_of, sizes_of
from worker.model.parallel_modules import RowParallel, VocabularyParallel
from worker.parallel.split import Seat, Shard, shard_of

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def build_shard(config: Any, seat: Seat, attention: str) -> tuple[Any, Shard, dict[str, Part]]:
    """Return a rank's module without weights, its shard, and where each parameter comes from.

    Raises:
        NotSupported: The model cannot be split so.
    """
    module = _skeleton(config, attention)
    shard = shard_of(sizes_of(module), seat)
    _make_buffers(module)
    tied = module.lm_head.weight is module.model.embed_tokens.weight
    if seat.pp > 1:
        _check_between_layers(module)
    _cut(module, shard)
    head_dim = head_dim_of(module.config)
    parts = {
        name: _part(name, parameter, _Cuts(shard, head_dim), tied=tied)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }
    return module, shard, parts


def read_parts(
    folder: Path, parts: dict[str, Part], dtype: torch.dtype
) -> tuple[dict[str, Tensor], int]:
    """Read a rank's parameters; those that come from the same part are one tensor.

    Returns:
        The parameters by name, on the CPU, and how many bytes were read from the files.

    Raises:
        InvalidRequest: One is not there, or does not fit.
    """
    tensors: dict[str, Tensor] = {}
    read: dict[tuple[str | None, range], Tensor] = {}
    with Checkpoint(folder) as checkpoint:
        if lacking := checkpoint.lacking(list(parts.values())):
            names = ", ".join(sorted(lacking)[:3])
            raise InvalidRequest(f"--model: {folder} lacks weights: {names}, ...")
        for name, part in parts.items():
            key = (checkpoint.name_of(part), part.span)
            if key not in read:
                read[key] = checkpoint.read(part, dtype)
            tensors[name] = read[key]
        return tensors, checkpoint.bytes_read


def fill(module: Any, tensors: dict[str, Tensor], device: torch.device) -> None:
    """Give a module without weights its parameters; tensors that are shared stay so."""
    made: dict[int, nn.Parameter] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            made[id(tensor)] = nn.Parameter(tensor.to(device), requires_grad=False)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, made[id(tensor)])


def _skeleton(config: Any, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
    except (ValueError, ImportError) as error:
        raise InvalidRequest(f"--model: cannot build the model: {error}") from error
    return module.eval()


def _make_buffers(module: Any) -> None:
    # What is computed from the config and lies in no file: made once more, with numbers.
    module.model.rotary_emb = type(module.model.rotary_emb)(config=module.config)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise NotSupported(f"--tp and --pp above 1: this engine cannot make the buffer {name}")


def _check_between_layers(module: Any) -> None:
    """Refuse a model that computes something between stages that would be computed twice.

    A decoder without layers and norm must hand on what it gets, or a later stage would
    do to activations what is meant for embeddings.
    """
    decoder = module.model
    layers, norm = decoder.layers, decoder.norm
    decoder.layers, decoder.norm = nn.ModuleList(), nn.Identity()
    given = torch.linspace(-1.0, 1.0, module.config.hidden_size)[None, None]
    positions = torch.zeros(1, 1, dtype=torch.long)
    with torch.inference_mode():
        passed = decoder(inputs_embeds=given, position_ids=positions, use_cache=False)
    decoder.layers, decoder.norm = layers, norm
    if not torch.equal(passed.last_hidden_state, given):
        raise NotSupported(f"--pp above 1: {type(decoder).__name__} scales its embeddings")


def _cut(module: Any, shard: Shard) -> None:
    decoder = module.model
    decoder.layers = nn.ModuleList(decoder.layers[index] for index in shard.layers)
    for index, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = index  # of this rank's KV pool
        layer.self_attn.o_proj = RowParallel(layer.self_attn.o_proj)
        layer.mlp.down_proj = RowParallel(layer.mlp.down_proj)
    decoder.embed_tokens = (
        VocabularyParallel(decoder.embed_tokens, shard.vocabulary)
        if shard.embeds
        else nn.Identity()
    )
    if not shard.draws:
        decoder.norm, module.lm_head = nn.Identity(), nn.Identity()


class _Cuts:
    """Along which dimension the parameters of a module are cut, by the module's name."""

    def __init__(self, shard: Shard, head_dim: int) -> None:
        def wide(heads: range) -> range:
            return range(heads.start * head_dim, heads.stop * head_dim)

        self.first_layer = shard.layers.start
        self.of = {
            "q_proj": (0, wide(shard.queries)),
            "k_proj": (0, wide(shard.keys)),
            "v_proj": (0, wide(shard.keys)),
            "o_proj": (1, wide(shard.queries)),
            "gate_proj": (0, shard.inner),
            "up_proj": (0, shard.inner),
            "down_proj": (1, shard.inner),
            "embed_tokens": (0, shard.vocabulary),
            "lm_head": (0, shard.vocabulary),
        }


def _part(name: str, parameter: Tensor, cuts: _Cuts, *, tied: bool) -> Part:
    names = tuple(_sources(name, cuts.first_layer, tied=tied))
    shape = tuple(parameter.shape)
    dim, span = cuts.of.get(name.split(".")[-2], (None, range(0)))
    if dim is None or dim >= len(shape):  # norms, and biases that are added after the sum
        return Part(names=names, shape=shape)
    return Part(names=names, shape=shape, dim=dim, span=span)


def _sources(name: str, first_layer: int, *, tied: bool) -> Iterator[str]:
    """Yield the names in the files that a parameter of the cut module may have."""
    pieces = name.split(".")
    if pieces[:2] == ["model", "layers"]:
        pieces[2] = str(int(pieces[2]) + first_layer)
    yield ".".join(pieces)
    if tied and name in (_EMBEDDING, _HEAD):
        yield _HEAD if name == _EMBEDDING else _EMBEDDING
