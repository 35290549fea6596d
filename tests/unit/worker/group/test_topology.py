"""Rank numbers and places name each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.group.topology import Place, Topology

SIZES = st.integers(1, 5)


@given(dp=SIZES, pp=SIZES, tp=SIZES)
def test_numbers_and_places_are_one_to_one(dp: int, pp: int, tp: int) -> None:
    topology = Topology(dp, pp, tp)
    places = [topology.place(number) for number in range(topology.size)]
    assert len(set(places)) == dp * pp * tp
    assert [topology.number(place) for place in places] == list(range(topology.size))


def test_tp_runs_fastest_and_a_replica_s_ranks_stand_together() -> None:
    topology = Topology(dp=2, pp=2, tp=4)
    assert topology.place(5) == Place(0, 1, 1)
    replica = list(topology.replica(1))
    assert replica[0] == Place(1, 0, 0)
    assert [topology.number(place) for place in replica] == list(range(8, 16))


def test_what_is_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Topology(tp=0)
    with pytest.raises(ValueError, match="not in"):
        Topology(tp=2).place(2)
    with pytest.raises(ValueError, match="not in"):
        Topology(tp=2).number(Place(0, 0, 2))


def test_a_place_reads_like_a_process_title() -> None:
    assert str(Place(1, 2, 3)) == "dp=1 pp=2 tp=3"
