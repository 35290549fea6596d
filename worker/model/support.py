"""What a model must not need, because the engine's attention does not do it.

Knows transformers' configs by their fields; loads nothing. A model that would be
computed wrongly is refused at the start, with what would make it servable.
"""

from typing import Any, Final

from radixmesh.errors import InvalidRequest, NotSupported

_ATTENTION_LAYERS: Final = frozenset({"full_attention", "sliding_attention"})


def check_config(config: Any, max_model_len: int) -> None:
    """Refuse a model whose attention is more than causal attention over all positions.

    Args:
        config: transformers' text config.
        max_model_len: Longest sequence that will be served.

    Raises:
        NotSupported: It is; the message names what.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise NotSupported("models with an encoder are not served")
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - _ATTENTION_LAYERS:
        names = ", ".join(sorted(kinds - _ATTENTION_LAYERS))
        raise NotSupported(f"this engine does not compute layers of kind {names}")
    window = getattr(config, "sliding_window", None)
    if window is not None and (not kinds or "sliding_attention" in kinds):
        check_window(window, max_model_len)
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise NotSupported("this engine's attention does not cap its scores (softcapping)")
    _check_rope(getattr(config, "rope_parameters", None) or {}, max_model_len)


def check_window(window: object, max_model_len: int) -> None:
    """Refuse a sliding window that a sequence could outgrow.

    Raises:
        NotSupported: It could; the message says which limit makes the model servable.
    """
    if isinstance(window, int) and window >= max_model_len:
        return
    raise NotSupported(
        f"the model attends in a sliding window of {window} positions, which this engine does not "
        f"do; serve it with --max-model-len {window} or less"
    )


def _check_rope(parameters: dict[str, Any], max_model_len: int) -> None:
    # One set of parameters, or one per kind of layer.
    sets = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    for rope in sets:
        limit = rope.get("original_max_position_embeddings")
        # It changes all positions when the longest sequence of a batch crosses the limit.
        if rope.get("rope_type") == "longrope" and limit and max_model_len > limit:
            raise NotSupported(
                f"positions beyond {limit} (longrope) are not served; "
                f"serve the model with --max-model-len {limit} or less"
            )


def choose_max_model_len(config: Any, wanted: int) -> int:
    """Return the longest sequence to serve: `wanted`, or the model's own limit for 0.

    Raises:
        InvalidRequest: More is wanted than the model has positions, or it names no limit.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not limit:
        if wanted <= 0:
            raise InvalidRequest("--max-model-len: the model's config names no limit; give one")
        return wanted
    if wanted > limit:
        raise InvalidRequest(f"--max-model-len: the model has {limit} positions, got {wanted}")
    return wanted if wanted > 0 else int(limit)
