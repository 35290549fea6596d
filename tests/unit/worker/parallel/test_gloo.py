"""Tensors over gloo: the bits of shared memory, and a typed end when a rank is not there."""

import signal

import pytest
import torch

from tests.fakes import tensor_ranks as does
from tests.fakes.tensor_ranks import Deed


@pytest.mark.parametrize("tp", [2, 3])
def test_sums_have_the_bits_of_adding_by_rank_on_every_rank(tp: int) -> None:
    deeds = [
        Deed(kind, seed, shape, dtype)
        for seed, shape in enumerate([(), (3, 7), (5, 1153)])
        for dtype in ("float32", "bfloat16", "float16")
        for kind in ("sum", "gather")
    ]
    with does.ranks(tp=tp, tensors="gloo") as found:
        assert found.each(does.kinds) == [("GlooGroup", "OneStage")] * tp
        assert found.each(does.do, deeds) == [[deed.expected(tp) for deed in deeds]] * tp
        whole = torch.arange(24.0).view(4, 6)
        whole[:, ::2] *= tp
        expected = (whole.flatten().tolist(), whole[:, 1::2].t().flatten().tolist())
        assert found.each(does.sliced) == [expected] * tp


def test_desync_another_plan_on_one_rank_is_told_to_all() -> None:
    with does.ranks(tp=3, tensors="gloo") as found:
        answers = found.each(does.plan, [2**64 - 1, 2**64 - 1, 0xDEF])
    assert [answer.kind for answer in answers] == ["RankDesync"] * 3
    assert "ffffffffffffffff" in answers[2].message
    assert "0000000000000def" in answers[0].message


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_is_lost_after_the_deadline(fault: signal.Signals) -> None:
    with does.ranks(tp=2, tensors="gloo", peer_timeout_s=0.5) as found:
        found.each(does.add)
        found.signal(1, fault)
        found.tell(0, does.wait_in_vain)
        error, waited, _ = found.answer(0)
    assert error.kind == "PeerLost"
    assert waited < 3


def test_a_rank_that_leaves_ends_the_others_calls() -> None:
    with does.ranks(tp=2, tensors="gloo") as found:
        found.each(does.add)
        found.tell(1, does.close)
        found.answer(1)
        found.tell(0, does.wait_in_vain)
        error, waited, _ = found.answer(0)
    assert error.kind == "PeerLost"
    assert waited < 3
