"""What must never share cache has keys of its own, whatever its parts are called."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.blocks import Namespace, block_keys, pack_ids

PARTS = ("model", "weight_version", "fingerprint", "adapter", "cache_salt")
# Few letters, and those that a careless join would use.
TEXT = st.text("ab/:|\0 ", max_size=4)
NAMESPACES = st.builds(Namespace, **dict.fromkeys(PARTS, TEXT))
IDS = pack_ids(range(64))


def first_key(namespace: Namespace) -> int:
    return block_keys(IDS, block_tokens=16, seed=namespace.seed())[0]


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[Namespace, Namespace]:
    """Two namespaces that say the same when their parts are written one after the other."""
    text = draw(st.text("ab/:|\0 ", max_size=6))
    cuts = st.lists(st.integers(0, len(text)), min_size=4, max_size=4).map(sorted)

    def cut() -> Namespace:
        ends = [0, *draw(cuts), len(text)]
        parts = [text[start:end] for start, end in pairwise(ends)]
        return Namespace(**dict(zip(PARTS, parts, strict=True)))

    return cut(), cut()


@given(two_cuts())
def test_different_namespaces_have_different_seeds(pair: tuple[Namespace, Namespace]) -> None:
    one, other = pair
    assert (one.encode() == other.encode()) == (one == other)
    assert (one.seed() == other.seed()) == (one == other)


@pytest.mark.parametrize(("one", "other"), [*combinations(PARTS[1:], 2)])
def test_the_same_word_in_another_part_is_another_namespace(one: str, other: str) -> None:
    base = Namespace(model="m")
    keys = [first_key(base)] + [first_key(replace(base, **{part: "x"})) for part in (one, other)]
    assert len(set(keys)) == 3


@given(NAMESPACES)
def test_no_key_of_one_namespace_is_in_another(namespace: Namespace) -> None:
    other = replace(namespace, cache_salt=namespace.cache_salt + "s")
    mine, theirs = (
        block_keys(IDS, block_tokens=16, seed=each.seed()) for each in (namespace, other)
    )
    assert not set(mine) & set(theirs)
