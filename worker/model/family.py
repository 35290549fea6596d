"""Which models can be split: those built of the Llama family's modules, by their names.

Knows transformers' modules by name, type and width; loads nothing. A model with one
module more, fewer or wider than the family has would be computed wrongly by parts, so
it is refused.
"""

from typing import Any, Final

from torch import nn

from radixmesh.errors import NotSupported
from worker.parallel.split import Sizes

_LAYER: Final = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_PARTS: Final[dict[str, tuple[frozenset[str], frozenset[str]]]] = {
    "": (frozenset({"model", "lm_head"}), frozenset()),
    "model": (frozenset({"embed_tokens", "layers", "norm", "rotary_emb"}), frozenset()),
    "layer": (_LAYER, frozenset()),
    "self_attn": (
        frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
        frozenset({"q_norm", "k_norm"}),
    ),
    "mlp": (frozenset({"gate_proj", "up_proj", "down_proj"}), frozenset({"act_fn"})),
}


def head_dim_of(config: Any) -> int:
    """Return the width of one head."""
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def sizes_of(module: Any) -> Sizes:
    """Return what of a model is split, after checking that it can be.

    Args:
        module: transformers' causal language model, whole; may be on the meta device.

    Raises:
        NotSupported: It has other modules than the family; names one.
    """
    config = module.config
    if getattr(config, "quantization_config", None) is not None:
        raise _refusal("", module, "its weights are quantized")
    _check_names("", module, "")
    _check_names("model", module.model, "model")
    _check_type("model.embed_tokens", module.model.embed_tokens, nn.Embedding)
    _check_type("lm_head", module.lm_head, nn.Linear)
    sizes = Sizes(
        query_heads=config.num_attention_heads,
        key_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        layers=len(module.model.layers),
    )
    for index, layer in enumerate(module.model.layers):
        _check_layer(f"model.layers.{index}", layer, sizes, config)
    _check_parameters(module, {config.hidden_size, head_dim_of(config)})
    return sizes


def _check_layer(path: str, layer: Any, sizes: Sizes, config: Any) -> None:
    _check_names(path, layer, "layer")
    _check_names(f"{path}.self_attn", layer.self_attn, "self_attn")
    _check_names(f"{path}.mlp", layer.mlp, "mlp")
    width, head_dim = config.hidden_size, head_dim_of(config)
    queries, keys = sizes.query_heads * head_dim, sizes.key_heads * head_dim
    _check_linear(f"{path}.self_attn.q_proj", layer.self_attn.q_proj, (queries, width))
    _check_linear(f"{path}.self_attn.k_proj", layer.self_attn.k_proj, (keys, width))
    _check_linear(f"{path}.self_attn.v_proj", layer.self_attn.v_proj, (keys, width))
    _check_linear(f"{path}.self_attn.o_proj", layer.self_attn.o_proj, (width, queries))
    _check_linear(f"{path}.mlp.gate_proj", layer.mlp.gate_proj, (sizes.inner, width))
    _check_linear(f"{path}.mlp.up_proj", layer.mlp.up_proj, (sizes.inner, width))
    _check_linear(f"{path}.mlp.down_proj", layer.mlp.down_proj, (width, sizes.inner))
    for name in ("q_norm", "k_norm"):
        norm = getattr(layer.self_attn, name, None)
        # One that is as wide as all heads together would need the other ranks.
        if norm is not None and tuple(norm.weight.shape) != (head_dim,):
            raise _refusal(f"{path}.self_attn.{name}", norm, "it is not of one head")


def _check_names(path: str, module: nn.Module, kind: str) -> None:
    needed, possible = _PARTS[kind]
    # Dropout does nothing where nothing is trained.
    found = {n for n, child in module.named_children() if not isinstance(child, nn.Dropout)}
    if needed - found:
        raise _refusal(path, module, f"it has no {min(needed - found)}")
    if found - needed - possible:
        name = min(found - needed - possible)
        raise _refusal(f"{path}.{name}".lstrip("."), module.get_submodule(name), "unknown")


def _check_type(path: str, module: nn.Module, kind: type[nn.Module]) -> None:
    # Exactly: a subclass computes something else.
    if type(module) is not kind:
        raise _refusal(path, module, f"it is no plain {kind.__name__}")


def _check_linear(path: str, module: nn.Module, shape: tuple[int, int]) -> None:
    _check_type(path, module, nn.Linear)
    if tuple(module.weight.shape) != shape:
        raise _refusal(path, module, f"its weight is not {shape}")


def _check_parameters(module: nn.Module, widths: set[int]) -> None:
    for path, each in module.named_modules():
        if isinstance(each, nn.Linear | nn.Embedding):
            continue
        for name, parameter in each.named_parameters(recurse=False):
            if name != "weight" or parameter.ndim != 1 or parameter.shape[0] not in widths:
                raise _refusal(path, each, f"unknown parameter {name}")


def _refusal(path: str, module: nn.Module, why: str) -> NotSupported:
    name = f"{path} ({type(module).__name__})" if path else type(module).__name__
    return NotSupported(f"--tp and --pp above 1: this engine cannot split {name}: {why}")
