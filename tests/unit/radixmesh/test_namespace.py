"""What must never share cache has keys of its own, whatever its parts are called."""

from dataclasses import replace
from itertools import combinations

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


@given(NAMESPACES, NAMESPACES)
def test_different_namespaces_have_different_seeds(one: Namespace, other: Namespace) -> None:
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
