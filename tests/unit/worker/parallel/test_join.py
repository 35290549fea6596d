"""Joining: the way that the configuration and the host allow, the same on all ranks."""

import pytest
import torch

from radixmesh.errors import NotSupported
from tests.fakes import tensor_ranks as does
from worker.config import RankConfig
from worker.parallel.group import Alone, OneStage
from worker.parallel.join import join
from worker.parallel.segment import abort


def test_a_lone_rank_meets_nobody() -> None:
    peers = join(RankConfig(model_dir=""), torch.float32, torch.device("cpu"))
    assert isinstance(peers.group, Alone)
    assert isinstance(peers.stages, OneStage)
    assert not torch.distributed.is_initialized()


def test_ranks_with_neither_memory_nor_a_place_to_meet_are_refused() -> None:
    with pytest.raises(NotSupported, match="place to meet"):
        join(RankConfig(model_dir="", tp=2), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("bare", [{0, 1, 2}, {1}])
def test_all_ranks_go_by_gloo_when_one_finds_no_compiler(bare: set[int]) -> None:
    with (
        does.shared_memory(3) as segment,
        does.ranks(tp=3, segment=segment, bare=bare) as found,
    ):
        assert found.each(does.kinds) == [("GlooGroup", "OneStage")] * 3
        assert found.each(does.add) == [does.bits(torch.full((4,), 3.0))] * 3


def test_a_stop_while_ranks_meet_ends_the_meeting() -> None:
    # One of the three that the memory is for never comes.
    with does.shared_memory(3) as segment:
        abort(segment)
        with does.ranks(tp=2, segment=segment) as found:
            answers = found.each(does.kinds)
    assert {answer.kind for answer in answers} == {"PeerLost"}


def test_a_rank_that_does_not_come_is_lost() -> None:
    from worker.parallel.segment import agree
    from worker.peers import PeerLost

    with does.shared_memory(2) as segment, pytest.raises(PeerLost, match="tp=1"):
        agree(segment, 0, able=True, timeout_s=0.02)
