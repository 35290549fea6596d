"""Which part of a model each rank has: heads, inner units, vocabulary, layers. Pure arithmetic.

A rank's query heads use key-value heads that it holds, the same number of queries to
each, so attention needs no other rank. Where there are fewer key-value heads than
ranks, several ranks hold the same one and share its queries. Parts may be uneven; the
first ranks have the larger ones.
"""

from dataclasses import dataclass
from itertools import pairwise

from radixmesh.errors import NotSupported

# Widths that matrix units like; parts end on multiples of it where there is enough to go round.
_UNIT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank of how many, in both directions of a replica."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.tp * self.pp == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of a model is split.

    Attributes:
        query_heads: Per layer; key_heads likewise, for keys and values.
        inner: Width of the feed-forward layers.
        vocabulary: Rows of the embedding and of the head.
        layers: Of the decoder.
    """

    query_heads: int
    key_heads: int
    inner: int
    vocabulary: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One rank's part of a model. Ranges count in the whole model.

    Attributes:
        queries: Query heads.
        keys: Key-value heads.
        inner: Units between the feed-forward layers.
        vocabularies: Of each tp rank, the ids whose embedding and logits it has.
        vocabulary: Those of this rank.
        layers: Of its stage.
        embeds: Whether its stage turns ids into activations.
        draws: Whether its stage turns activations into logits.
    """

    queries: range
    keys: range
    inner: range
    vocabularies: tuple[range, ...]
    vocabulary: range
    layers: range
    embeds: bool
    draws: bool


def shard_of(sizes: Sizes, seat: Seat) -> Shard:
    """Return the part of a rank.

    Raises:
        NotSupported: The model cannot be split into so many parts; names the flag.
    """
    queries, keys = split_heads(sizes.query_heads, sizes.key_heads, seat.tp)[seat.tp_rank]
    vocabularies = split_evenly(sizes.vocabulary, seat.tp, unit=_UNIT)
    return Shard(
        queries=queries,
        keys=keys,
        inner=split_evenly(sizes.inner, seat.tp, unit=_UNIT)[seat.tp_rank],
        vocabularies=tuple(vocabularies),
        vocabulary=vocabularies[seat.tp_rank],
        layers=split_layers(sizes.layers, seat.pp)[seat.pp_rank],
        embeds=seat.pp_rank == 0,
        draws=seat.pp_rank == seat.pp - 1,
    )


def split_heads(query_heads: int, key_heads: int, tp: int) -> list[tuple[range, range]]:
    """Return query heads and key-value heads of each tp rank.

    Raises:
        NotSupported: There are more ranks than query heads, or the heads don't form groups.
    """
    group, odd = divmod(query_heads, key_heads)
    if odd:
        raise NotSupported(f"--tp: {key_heads} key-value heads don't divide {query_heads} queries")
    if tp > query_heads:
        raise NotSupported(f"--tp {tp}: the model has {query_heads} query heads, one rank each")
    if tp <= key_heads:
        held = split_evenly(key_heads, tp)
        return [(range(keys.start * group, keys.stop * group), keys) for keys in held]
    parts = []
    for key, ranks in enumerate(split_evenly(tp, key_heads)):
        for queries in split_evenly(group, len(ranks)):
            first = key * group
            parts.append((range(first + queries.start, first + queries.stop), range(key, key + 1)))
    return parts


def split_evenly(count: int, parts: int, *, unit: int = 1) -> list[range]:
    """Return consecutive ranges over `count` that differ by one unit at most, longest first.

    Their ends are multiples of `unit`, but for the last one's; where there are fewer
    units than parts, a unit is 1.

    Raises:
        NotSupported: There is less than one for each part.
    """
    if count < parts:
        raise NotSupported(f"--tp {parts}: {count} cannot be split into so many parts")
    units = -(-count // unit)
    if units < parts:
        unit, units = 1, count
    each, more = divmod(units, parts)
    edges = [unit * (each * part + min(part, more)) for part in range(parts)] + [count]
    return [range(begin, end) for begin, end in pairwise(edges)]


def split_layers(layers: int, pp: int) -> list[range]:
    """Return the layers of each stage; counts differ by one at most.

    The last stage computes the head, the first holds the embedding: what does not divide
    goes to the stages between them, then to the first.

    Raises:
        NotSupported: There are more stages than layers.
    """
    if pp > layers:
        raise NotSupported(f"--pp {pp}: the model has {layers} layers, one stage each")
    each, more = divmod(layers, pp)
    longer = [*range(1, pp - 1), 0][:more]
    edges = [0]
    for stage in range(pp):
        edges.append(edges[-1] + each + (stage in longer))
    return [range(begin, end) for begin, end in pairwise(edges)]
