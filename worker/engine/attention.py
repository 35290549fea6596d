"""Attention over the paged KV pool, as the attention function of transformers' modules.

Knows tensors, block tables and transformers' attention interface; knows no
requests and no scheduler. Every read goes through a block table, every write
through a slot, so pages may lie anywhere in the pool.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from radixmesh.errors import InvalidRequest, NotSupported
from worker.engine.inputs import Batch, DecodeGroup, Prefill
from worker.model.support import check_window

ATTENTION = "radixmesh_paged"

# What modules hand to their attention function and what changes nothing here.
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "cache", "past_key_values", "cache_position", "is_causal"}
    | {"output_attentions", "output_hidden_states", "return_dict", "layer_idx", "training"}
)


@dataclass(frozen=True, slots=True)
class KvShape:
    """One layer's share of the pool: key-value heads, and the widths of a key and a value."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one position takes in this layer."""
        return self.heads * (self.key_dim + self.value_dim) * int(dtype.itemsize)


class KvPool:
    """The pages of every layer: keys and values, each [blocks, block_tokens, heads, dim].

    Making one raises InvalidRequest when there is no memory for so many.
    """

    def __init__(
        self,
        shapes: list[KvShape],
        *,
        blocks: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def pages(heads: int, dim: int) -> Tensor:
            return _zeros((blocks, block_tokens, heads, dim), dtype, device)

        try:
            self.keys = [pages(shape.heads, shape.key_dim) for shape in shapes]
            self.values = [pages(shape.heads, shape.value_dim) for shape in shapes]
        except (MemoryError, ValueError, torch.OutOfMemoryError) as error:
            # numpy calls a size that no address reaches a wrong value.
            tokens = blocks * block_tokens
            raise InvalidRequest(
                f"--kv-tokens, --kv-bytes: there is no memory for the KV of {tokens} ids"
            ) from error

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write keys and values [T, heads, dim] at slots [T]; slot = block * size + offset."""
        for pages, new in ((self.keys[layer], key), (self.values[layer], value)):
            # A NaN left in a page would reach the page's next owner through masked positions.
            finite = torch.nan_to_num(new, nan=0.0, posinf=0.0, neginf=0.0)
            pages.flatten(0, 1).index_copy_(0, slots, finite)

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [sequences, heads, positions, dim] of block tables [.., n]."""
        flat, rows = blocks.flatten(), blocks.shape[0]
        keys = self.keys[layer].index_select(0, flat).unflatten(0, (rows, -1))
        values = self.values[layer].index_select(0, flat).unflatten(0, (rows, -1))
        return keys.flatten(1, 2).transpose(1, 2), values.flatten(1, 2).transpose(1, 2)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeros, not empty: what a mask hides is still multiplied by 0, and 0 * NaN is NaN.
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch would write them all at the start; numpy's take memory when they are first used.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The attention of one step: its batch over the pool."""

    pool: KvPool
    batch: Batch

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
        """Store the step's keys and values, then attend.

        Args:
            layer: Index of the layer.
            qkv: Queries, keys, values, each [heads, T, dim].
            scale: Factor on the scores.

        Returns:
            [T, heads, value_dim].
        """
        query, key, value = (part.transpose(0, 1) for part in qkv)
        self.pool.write(layer, self.batch.slots, key, value)
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for group in self.batch.decode:
            out.index_copy_(0, group.rows, self._decode(layer, group, query, scale))
        for part in self.batch.prefill:
            span = slice(part.begin, part.end)
            kv = (key[span], value[span])
            out[span] = self._prefill(layer, part, (query[span], *kv), scale)
        return out

    def _decode(self, layer: int, group: DecodeGroup, query: Tensor, scale: float) -> Tensor:
        keys, values = self.pool.read(layer, group.blocks)
        rows, heads = len(group.rows), keys.shape[1]
        # The query heads that share a key head become its queries: nothing is repeated.
        grouped = query.index_select(0, group.rows).unflatten(1, (heads, -1))
        out = functional.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=group.mask, scale=scale
        )
        return out.reshape(rows, query.shape[1], values.shape[3])

    def _prefill(
        self, layer: int, part: Prefill, qkv: tuple[Tensor, Tensor, Tensor], scale: float
    ) -> Tensor:
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in qkv)
        if part.blocks is not None:
            key, value = self.pool.read(layer, part.blocks)
            key, value = key[:, :, : part.kv_len], value[:, :, : part.kv_len]
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=part.mask,
            is_causal=part.mask is None,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out[0].transpose(0, 1)


@dataclass(slots=True)
class KvProbe:
    """Stands in for `PagedStep` in one pass over one id, and learns the pool's shape.

    Attributes:
        max_model_len: Longest sequence; a sliding window at least as long is no window.
        shapes: Per layer index, what it wrote.
    """

    max_model_len: int
    shapes: dict[int, KvShape] = field(default_factory=dict)

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
        """Note the shape of a layer; return zeros."""
        del scale
        query, key, value = qkv
        if layer in self.shapes:
            raise NotSupported(f"layer {layer} attends twice; its KV cannot be paged")
        if query.shape[0] % key.shape[0] or key.shape[0] != value.shape[0]:
            raise NotSupported(f"layer {layer}: {key.shape[0]} key heads don't divide its queries")
        self.shapes[layer] = KvShape(key.shape[0], key.shape[2], value.shape[2])
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])

    def check(self, module: torch.nn.Module, features: dict[str, object]) -> None:
        """Refuse an attention that does more than causal attention over all positions.

        Raises:
            NotSupported: It does; the message names what.
        """
        if not getattr(module, "is_causal", True) or features.get("is_causal") is False:
            raise NotSupported("attention that is not causal cannot be served")
        for name, value in features.items():
            if value is None or value is False or name in _HARMLESS:
                continue
            if name == "sliding_window":
                check_window(value, self.max_model_len)
                continue
            raise NotSupported(f"this engine's attention does not do {name!r}")


def register() -> None:
    """Make `attn_implementation=ATTENTION` known to transformers. May be called again."""
    # Not at the top: the process is taken offline before transformers is imported.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _no_mask)


def _no_mask(*args: object, **kwargs: object) -> None:
    """Masks come with the batch."""


def _attention(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedStep | KvProbe | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **features: object,
) -> tuple[Tensor, None]:
    """Attention of one layer; query, key, value are [1, heads, T, dim]."""
    layer = getattr(module, "layer_idx", None)
    if paged is None or not isinstance(layer, int) or attention_mask is not None or dropout:
        raise NotSupported(f"{type(module).__name__} cannot run on paged attention")
    if isinstance(paged, KvProbe):
        paged.check(module, features)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return paged.attend(layer, (query[0], key[0], value[0]), scale)[None], None
