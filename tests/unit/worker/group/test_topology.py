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


@given(dp=SIZES, pp=SIZES, tp=SIZES, nnodes=SIZES)
def test_hosts_share_every_stage_evenly_and_nothing_twice(
    dp: int, pp: int, tp: int, nnodes: int
) -> None:
    topology = Topology(dp, pp, tp * nnodes, nnodes)
    for dp_rank in range(dp):
        shares = [topology.share(dp_rank, node_rank) for node_rank in range(nnodes)]
        assert sorted(topology.number(place) for share in shares for place in share) == [
            topology.number(place) for place in topology.replica(dp_rank)
        ]
        assert {len(share) for share in shares} == {pp * tp}
        assert shares[0][0] == Place(dp_rank, 0, 0)


def test_a_host_has_neighbouring_tp_ranks_of_every_stage() -> None:
    share = Topology(dp=2, pp=2, tp=4, nnodes=2).share(1, 1)
    assert share == [Place(1, 0, 2), Place(1, 0, 3), Place(1, 1, 2), Place(1, 1, 3)]


def test_what_is_outside_is_refused() -> None:
    with pytest.raises(ValueError, match="not a multiple"):
        Topology(tp=3, nnodes=2)
    with pytest.raises(ValueError, match="at least 1"):
        Topology(tp=0)
    with pytest.raises(ValueError, match="not in"):
        Topology(tp=2).place(2)
    with pytest.raises(ValueError, match="not in"):
        Topology(tp=2).number(Place(0, 0, 2))


def test_a_place_reads_like_a_process_title() -> None:
    assert str(Place(1, 2, 3)) == "dp=1 pp=2 tp=3"


@given(dp=SIZES, pp=SIZES, here=SIZES, nnodes=SIZES)
def test_the_ranks_of_a_host_number_its_devices_without_gaps(
    dp: int, pp: int, here: int, nnodes: int
) -> None:
    topology = Topology(dp, pp, here * nnodes, nnodes)
    places = [topology.place(number) for number in range(topology.size)]
    for node in range(nnodes):
        devices = [topology.device(place) for place in places if topology.node(place) == node]
        assert devices == list(range(dp * pp * here))


def test_replicas_and_stages_of_one_host_take_devices_of_their_own() -> None:
    assert Topology(dp=2, pp=2, tp=4).device(Place(1, 0, 3)) == 11
    assert Topology(dp=2, pp=2, tp=4, nnodes=2).device(Place(1, 0, 3)) == 5
