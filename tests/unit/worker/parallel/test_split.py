"""A model's parts together are the model, and each part can be computed alone.

Run: pytest tests/unit/worker/parallel/test_split.py
"""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.errors import NotSupported
from worker.parallel.split import Seat, Sizes, shard_of, split_evenly, split_heads, split_layers

GROUPS = st.tuples(st.integers(1, 12), st.integers(1, 12))  # key-value heads, queries to each


def lengths(parts: list[range]) -> list[int]:
    return [len(part) for part in parts]


@given(heads=GROUPS, data=st.data())
def test_every_query_head_is_on_one_rank_beside_its_key_head(
    heads: tuple[int, int], data: st.DataObject
) -> None:
    key_heads, group = heads
    tp = data.draw(st.integers(1, key_heads * group))
    parts = split_heads(key_heads * group, key_heads, tp)
    assert len(parts) == tp
    assert list(chain(*(queries for queries, _ in parts))) == list(range(key_heads * group))
    assert set(chain(*(keys for _, keys in parts))) == set(range(key_heads))
    for queries, keys in parts:
        assert queries
        per_key, odd = divmod(len(queries), len(keys))
        assert not odd
        # What attention takes for granted: the i-th group of queries uses the i-th key head.
        assert all(query // group == keys[i // per_key] for i, query in enumerate(queries))


@given(heads=GROUPS, data=st.data())
def test_key_heads_are_copied_only_where_ranks_outnumber_them(
    heads: tuple[int, int], data: st.DataObject
) -> None:
    key_heads, group = heads
    tp = data.draw(st.integers(1, key_heads * group))
    parts = split_heads(key_heads * group, key_heads, tp)
    held = lengths([keys for _, keys in parts])
    if tp <= key_heads:
        assert sum(held) == key_heads
        assert max(held) - min(held) <= 1
    else:
        assert set(held) == {1}
        copies = [sum(key in keys for _, keys in parts) for key in range(key_heads)]
        assert max(copies) - min(copies) <= 1


@pytest.mark.parametrize(
    ("tp", "queries", "keys"),
    [
        (1, [9], [3]),
        (2, [6, 3], [2, 1]),
        (3, [3, 3, 3], [1, 1, 1]),
        (4, [2, 1, 3, 3], [1, 1, 1, 1]),
        (9, [1] * 9, [1] * 9),
    ],
)
def test_nine_query_and_three_key_heads(tp: int, queries: list[int], keys: list[int]) -> None:
    parts = split_heads(9, 3, tp)
    assert lengths([part for part, _ in parts]) == queries
    assert lengths([part for _, part in parts]) == keys


@given(st.integers(1, 5000), st.integers(1, 40), st.sampled_from([1, 16, 64]))
def test_even_parts_follow_each_other_and_differ_by_a_unit(
    count: int, parts: int, unit: int
) -> None:
    if parts > count:
        with pytest.raises(NotSupported, match="--tp"):
            split_evenly(count, parts, unit=unit)
        return
    made = split_evenly(count, parts, unit=unit)
    assert list(chain(*made)) == list(range(count))
    assert len(made) == parts
    assert min(lengths(made)) > 0
    whole = lengths(made[:-1]) or lengths(made)
    assert max(lengths(made)) - min(lengths(made)) < 2 * unit
    if -(-count // unit) >= parts > 1:
        assert all(length % unit == 0 for length in whole)


@given(st.integers(1, 90), st.integers(1, 90))
def test_layers_are_spread_evenly_and_the_last_stage_never_has_more(layers: int, pp: int) -> None:
    if pp > layers:
        with pytest.raises(NotSupported, match="--pp"):
            split_layers(layers, pp)
        return
    stages = split_layers(layers, pp)
    assert list(chain(*stages)) == list(range(layers))
    assert max(lengths(stages)) - min(lengths(stages)) <= 1
    assert len(stages[-1]) == min(lengths(stages))
    assert min(lengths(stages)) > 0


@pytest.mark.parametrize(
    ("layers", "pp", "counts"),
    [
        (30, 2, [15, 15]),
        (3, 2, [2, 1]),
        (4, 3, [1, 2, 1]),
        (5, 3, [2, 2, 1]),
        (30, 4, [7, 8, 8, 7]),
    ],
)
def test_what_does_not_divide_goes_to_the_middle(layers: int, pp: int, counts: list[int]) -> None:
    assert lengths(split_layers(layers, pp)) == counts


def test_heads_that_form_no_groups_and_too_many_ranks_are_refused_by_the_flag() -> None:
    with pytest.raises(NotSupported, match="--tp"):
        split_heads(9, 2, 2)
    with pytest.raises(NotSupported, match="--tp 10"):
        split_heads(9, 3, 10)


SMOLLM2 = Sizes(query_heads=9, key_heads=3, inner=1536, vocabulary=49152, layers=30)


def test_a_rank_s_share_of_the_default_model() -> None:
    shard = shard_of(SMOLLM2, Seat(tp=3, tp_rank=1, pp=2, pp_rank=1))
    assert (shard.queries, shard.keys) == (range(3, 6), range(1, 2))
    assert (shard.inner, shard.vocabulary) == (range(512, 1024), range(16384, 32768))
    assert (shard.layers, shard.embeds, shard.draws) == (range(15, 30), False, True)


def test_the_only_rank_has_all() -> None:
    shard = shard_of(SMOLLM2, Seat())
    assert (len(shard.queries), len(shard.keys), len(shard.inner)) == (9, 3, 1536)
    assert (shard.vocabulary, shard.layers) == (range(49152), range(30))
    assert Seat().alone
    assert shard.embeds
    assert shard.draws
