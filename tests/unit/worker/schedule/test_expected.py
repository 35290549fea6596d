"""What queued requests will bring, counted once, is what a set of their prefixes says."""

from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.expected import Expected, common

# Chains that share beginnings: a key names its whole prefix.
CHAINS = [
    [1, 2, 3, 4, 5, 6],
    [1, 2, 3, 7, 8],
    [1, 2, 9],
    [10, 11, 12],
    [],
]


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=30), st.integers(0, 4))
def test_the_depth_is_the_longest_prefix_that_somebody_brings(
    steps: list[tuple[int, bool]], asked: int
) -> None:
    expected = Expected()
    present: list[int] = []
    for number, leaves in steps:
        if leaves and number in present:
            present.remove(number)
            expected.remove(CHAINS[number])
        else:
            present.append(number)
            expected.add(CHAINS[number])
    known = {key for number in present for key in CHAINS[number]}
    keys = CHAINS[asked]
    depth = next((index for index, key in enumerate(keys) if key not in known), len(keys))
    assert expected.depth(keys, 0) == depth
    assert len(expected) == len(known)
    for number in present:
        expected.remove(CHAINS[number])
    assert len(expected) == 0


@given(st.sampled_from(CHAINS), st.sampled_from(CHAINS), st.integers(0, 3))
def test_what_is_common_is_at_least_what_is_held(
    keys: list[int], others: list[int], held: int
) -> None:
    held = min(held, len(keys))
    equal = 0
    while equal < min(len(keys), len(others)) and keys[equal] == others[equal]:
        equal += 1
    assert common(keys, others, held) == max(held, equal)
