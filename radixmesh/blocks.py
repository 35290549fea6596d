"""Chained block keys. Router and workers compute them here, so they agree byte for byte.

A block is `block_tokens` consecutive ids. Its key is xxh3-64 of its ids as
little-endian uint32, seeded by the key of the block before it; the first block
is seeded by the namespace. A key therefore names a whole prefix in a namespace.
A partial block has no key. The chained-hash idea is that of vLLM's prefix cache.
"""

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

ID_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What must never share cache.

    `model`, `weight_version` and `fingerprint` come from the group, `adapter` and
    `cache_salt` from the request.
    """

    model: str
    weight_version: str = ""
    fingerprint: str = ""
    adapter: str = ""
    cache_salt: str = ""

    def encode(self) -> bytes:
        """Canonical bytes: a domain tag, then each part with its length, so no two collide."""
        parts = (self.model, self.weight_version, self.fingerprint, self.adapter, self.cache_salt)
        encoded = [b"radixmesh.namespace.v1"]
        for part in parts:
            raw = part.encode()
            encoded.append(struct.pack("<I", len(raw)) + raw)
        return b"".join(encoded)

    def seed(self) -> int:
        """The 64-bit seed of the first block's key."""
        return xxhash.xxh3_64_intdigest(self.encode())


def block_keys(ids: bytes, *, block_tokens: int, seed: int) -> list[int]:
    """Return the key of every whole block of `ids`.

    Args:
        ids: Token ids, little-endian uint32, one after the other.
        block_tokens: Ids per block.
        seed: `Namespace.seed()`, or the key of the block before the first one.
    """
    size = block_tokens * ID_BYTES
    digest = xxhash.xxh3_64_intdigest
    whole = memoryview(ids)[: len(ids) // size * size]
    return [seed := digest(block, seed) for (block,) in struct.iter_unpack(f"{size}s", whole)]


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return ids as little-endian uint32.

    Raises:
        OverflowError: An id is negative or needs more than 32 bits.
    """
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(raw: bytes) -> "array[int]":
    """Return the ids of a run of little-endian uint32.

    Raises:
        ValueError: The length is no multiple of four.
    """
    ids = array("I")
    ids.frombytes(raw)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def split_run(raw: bytes, counts: Sequence[int]) -> list[bytes]:
    """Cut a run of ids into one run per entry.

    Raises:
        ValueError: The counts don't add up to the run.
    """
    runs = []
    start = 0
    for count in counts:
        end = start + count * ID_BYTES
        runs.append(raw[start:end])
        start = end
    if start != len(raw):
        raise ValueError(f"counts cover {start} bytes of a run of {len(raw)}")
    return runs
