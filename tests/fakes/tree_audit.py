"""An audit of a meta-tree's inside: whatever it was told, its runs must fit together."""

from collections import Counter

from router.tree.meta_tree import MetaTree
from router.tree.runs import KEY_BYTES, Runs, unpack


def audit(tree: MetaTree) -> None:
    """Check that runs, keys, parents, children and free numbers agree.

    Raises:
        AssertionError: They don't.
    """
    runs = tree._runs
    live = [number for number, keys in enumerate(runs.keys) if keys]
    _audit_keys(runs, live)
    _audit_forest(runs, live)
    assert tree.run_count == len(live)
    free = _free_numbers(runs)
    assert sorted([0, *live, *free]) == list(range(len(runs.masks)))


def _audit_keys(runs: Runs, live: list[int]) -> None:
    places = {key: number for number in live for key in unpack(runs.keys[number])}
    assert {**places, 0: 0} == runs.of
    assert sum(len(runs.keys[number]) for number in live) == KEY_BYTES * len(runs)


def _audit_forest(runs: Runs, live: list[int]) -> None:
    children: Counter[int] = Counter()
    heirs: Counter[int] = Counter()
    for number in live:
        parent = runs.parents[number]
        above = runs.of[parent]
        if above:
            assert unpack(runs.keys[above])[-1] == parent, "a run hangs below the end of another"
        children[above] += 1
        heirs[above] ^= number
    for number in live:
        assert runs.children[number] == children[number]
        assert runs._heirs[number] == heirs[number]
        assert runs.masks[number] or children[number], "what nobody holds is gone"
        if children[number] == 1:
            assert runs.masks[heirs[number]] != runs.masks[number], "one run where one is enough"


def _free_numbers(runs: Runs) -> list[int]:
    free, number, before = [], runs._free, 0
    while number:
        assert runs._heirs[number] == before
        free.append(number)
        number, before = runs.children[number], number
    return free
