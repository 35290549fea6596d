"""What a replica says of its prefix cache: numbered changes, parts of a snapshot, digests."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one prompt below `parent` (0: the prompt's first)."""

    parent: int
    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that left, children before parents."""

    keys: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache was emptied."""

    keys: Sequence[int] = ()


Change = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a snapshot: keys, and the parent of each, parents first."""

    as_of: int
    keys: Sequence[int]
    parents: Sequence[int]
    first: bool = False
    last: bool = False


@dataclass(frozen=True, slots=True)
class Digest:
    """What the cache holds after event `sequence`."""

    sequence: int
    block_count: int
    xor_keys: int
