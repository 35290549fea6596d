"""What rank (0, 0) makes of the ranks' marks, when a rank is lost while others have answered."""

from collections import deque
from collections.abc import Mapping, Sequence

import pytest

from radixmesh.errors import RankDesync
from worker.group.compare import Comparison
from worker.group.plans import Plans
from worker.group.topology import Topology
from worker.peers import PeerLost


class ScriptedRoot:
    """Marks that are there, by rank; a rank that has none left is silent."""

    def __init__(self, marks: Mapping[int, Sequence[int]]) -> None:
        self._marks = {rank: deque(values) for rank, values in marks.items()}

    def hellos(self) -> list[bytes]:
        return []

    def broadcast(self, record: bytes) -> None:
        del record

    def marks(self, ranks: Sequence[int], timeout_s: float | None = None) -> list[int]:
        del timeout_s
        values = []
        for rank in ranks:
            if not self._marks[rank]:
                raise PeerLost(f"rank {rank} gave no answer in time")
            values.append(self._marks[rank].popleft())
        return values

    def close(self) -> None:
        pass


def compared(marks: Mapping[int, Sequence[int]]) -> Comparison:
    """Two stages of two ranks each, with two steps under way."""
    comparison = Comparison(ScriptedRoot(marks), Plans(3), Topology(pp=2, tp=2))
    comparison.before_launch(0, 100)
    comparison.before_launch(1, 101)
    return comparison


def test_ranks_that_answered_before_another_fell_silent_do_not_differ() -> None:
    comparison = compared({1: [100, 101], 2: [100, 101], 3: []})
    with pytest.raises(PeerLost, match="rank 3"):
        comparison.before_commit(0)
    comparison.explain()


def test_a_rank_that_differs_is_told_though_a_later_one_is_silent() -> None:
    comparison = compared({1: [100, 101], 2: [7, 8], 3: []})
    with pytest.raises(RankDesync, match=r"ranks \[2\] planned another step 0"):
        comparison.before_commit(0)


def test_a_rank_that_differs_is_told_though_an_earlier_one_is_silent() -> None:
    comparison = compared({1: [100, 101], 2: [], 3: [7, 8]})
    with pytest.raises(PeerLost, match="rank 2"):
        comparison.before_commit(0)
    with pytest.raises(RankDesync, match=r"ranks \[3\] planned another step 0"):
        comparison.explain()
