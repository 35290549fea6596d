"""The ids of one request together with their block keys, grown together.

Keys are those of `radixmesh.blocks`, so the router computes the same ones. Knows
no blocks and no other request.
"""

from array import array

import xxhash

from radixmesh.blocks import block_keys, pack_ids, unpack_ids


class KeyedIds:
    """Ids in a namespace, and one key for each whole block of them."""

    __slots__ = ("block_tokens", "ids", "keys", "namespace")

    def __init__(self, raw: bytes, *, namespace: bytes, block_tokens: int) -> None:
        """Take ids as little-endian uint32; `namespace` is `blocks.Namespace.encode()`.

        Raises:
            ValueError: The length of `raw` is no multiple of four.
        """
        self.ids: array[int] = unpack_ids(raw)
        self.namespace = namespace
        self.block_tokens = block_tokens
        seed = xxhash.xxh3_64_intdigest(namespace)
        self.keys = block_keys(raw, block_tokens=block_tokens, seed=seed)

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, token_id: int) -> None:
        """Add one id, and the key of the block that it completes."""
        self.ids.append(token_id)
        if len(self.ids) % self.block_tokens:
            return
        seed = self.keys[-1] if self.keys else xxhash.xxh3_64_intdigest(self.namespace)
        raw = pack_ids(self.ids[-self.block_tokens :])
        self.keys += block_keys(raw, block_tokens=self.block_tokens, seed=seed)

    def block(self, index: int) -> "array[int]":
        """Return the ids of one whole block."""
        start = index * self.block_tokens
        return self.ids[start : start + self.block_tokens]
