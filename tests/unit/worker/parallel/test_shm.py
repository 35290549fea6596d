"""Tensors in shared memory: the right bits on every rank, and a typed end when one is not there."""

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import tensor_ranks as does
from tests.fakes.tensor_ranks import Deed, Failed, Ranks
from worker.config import RankConfig
from worker.parallel.segment import Unavailable, abort, make_segment
from worker.parallel.shm import ShmGroup

DTYPES = ("float32", "bfloat16", "float16")
# Buffers hold 4096 bytes: the last ones go in parts, the last but one fills a buffer.
SHAPES = ((), (0, 5), (1, 1), (3, 7), (1, 576), (2, 1024), (5, 1153))


@contextmanager
def shared(tp: int, **changes: Any) -> Iterator[Ranks]:
    with (
        does.shared_memory(tp) as segment,
        does.ranks(tp=tp, segment=segment, **changes) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with shared(3) as found:
        assert found.each(does.kinds) == [("ShmGroup", "OneStage")] * 3
        yield found


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_sums_have_the_bits_of_adding_by_rank_on_every_rank(tp: int) -> None:
    deeds = [
        Deed(kind, seed, shape, dtype)
        for seed, shape in enumerate(SHAPES)
        for dtype in DTYPES
        for kind in ("sum", "gather")
    ]
    with shared(tp, spin=tp == 2) as found:
        assert found.each(does.do, deeds) == [[deed.expected(tp) for deed in deeds]] * tp


deed = st.builds(
    Deed,
    st.sampled_from(["sum", "gather"]),
    st.integers(0, 99),
    st.tuples(st.integers(0, 3), st.integers(1, 1500)),
    st.sampled_from(DTYPES),
)


@settings(max_examples=40)
@given(st.lists(deed, max_size=12))
def test_any_row_of_calls_gives_what_each_gives_alone(three: Ranks, deeds: list[Deed]) -> None:
    assert three.each(does.do, deeds) == [[one.expected(3) for one in deeds]] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_16_bits_is_widened_and_rounded_as_torch_does(dtype: str) -> None:
    every = list(range(65536))
    shuffled = random.Random(1).sample(every, len(every))
    parts = [torch.tensor(part, dtype=torch.uint16) for part in (every, shuffled)]
    expected = does.added([part.view(getattr(torch, dtype)) for part in parts])
    nan = expected.isnan()
    with shared(2) as found:
        answers = found.each(does.add_words, [every, shuffled], dtype)
    assert answers[0] == answers[1]
    got = torch.frombuffer(bytearray(answers[0]), dtype=expected.dtype)
    assert torch.equal(got.isnan(), nan)
    assert does.bits(got[~nan]) == does.bits(expected[~nan])


def test_tensors_that_do_not_lie_side_by_side_are_summed_in_place(three: Ranks) -> None:
    whole = torch.arange(24.0).view(4, 6)
    whole[:, ::2] *= 3
    expected = (whole.flatten().tolist(), whole[:, 1::2].t().flatten().tolist())
    assert three.each(does.sliced) == [expected] * 3


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float64"])
def test_any_dtype_is_gathered(three: Ranks, dtype: str) -> None:
    kind = getattr(torch, dtype)
    rows = [torch.tensor([rank, 1, 0]).to(kind).tolist() for rank in range(3)]
    assert three.each(does.gather, dtype) == [rows] * 3


def test_more_ranks_than_cores_sleep_and_arrive() -> None:
    deeds = [Deed("sum", seed, (1, 64), "float32") for seed in range(300)]
    with shared(8) as found:
        assert found.each(does.do, deeds) == [[one.expected(8) for one in deeds]] * 8


def test_desync_another_plan_on_one_rank_is_told_to_all() -> None:
    with shared(3, peer_timeout_s=60.0) as found:
        answers = found.each(does.plan, [0xABC, 0xABC, 0xDEF])
        again = found.each(does.add)
    assert [answer.kind for answer in answers] == ["RankDesync"] * 3
    assert any("abc" in answer.message and "def" in answer.message for answer in answers)
    assert [answer.kind for answer in again] == ["RankDesync"] * 3


@pytest.mark.parametrize("odd", ["call", "size"])
def test_desync_another_call_on_one_rank_is_told_to_all(odd: str) -> None:
    with shared(3, peer_timeout_s=60.0) as found:
        found.tell(0, does.add)
        found.tell(1, does.other_call) if odd == "call" else found.tell(1, does.add, 5)
        found.tell(2, does.add)
        answers = [found.answer(number) for number in range(3)]
    assert [answer.kind for answer in answers] == ["RankDesync"] * 3


def test_a_silent_rank_is_lost_after_the_deadline_and_the_wait_costs_no_cpu() -> None:
    with shared(2, peer_timeout_s=0.5) as found:
        assert found.each(does.add) == [does.bits(torch.full((4,), 2.0))] * 2
        found.tell(0, does.wait_in_vain)
        error, waited, used = found.answer(0)
        found.tell(1, does.add)
        late = found.answer(1)
    assert error == Failed("PeerLost", "rank tp=1 did not come in time")
    assert 0.5 <= waited < 2
    assert used < 0.1
    assert late == Failed("PeerLost", "rank tp=0 waited in vain for another rank")


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_is_lost_after_the_deadline(fault: signal.Signals) -> None:
    with shared(3, peer_timeout_s=0.3, spin=True) as found:
        found.each(does.add)
        found.signal(1, fault)
        for number in (0, 2):
            found.tell(number, does.wait_in_vain)
        answers = [found.answer(number) for number in (0, 2)]
    assert [error.kind for error, _, _ in answers] == ["PeerLost"] * 2
    assert max(waited for _, waited, _ in answers) < 2


@pytest.mark.parametrize("spin", [True, False])
def test_a_stop_from_outside_ends_a_wait_long_before_its_deadline(spin: bool) -> None:
    with (
        does.shared_memory(2) as segment,
        does.ranks(tp=2, segment=segment, spin=spin, peer_timeout_s=60.0) as found,
    ):
        found.each(does.add)
        found.tell(0, does.add)
        abort(segment)
        assert found.answer(0) == Failed("PeerLost", "the ranks of this stage were stopped")


def test_a_rank_that_leaves_ends_the_others_calls_but_not_the_last_common_one() -> None:
    with shared(2, peer_timeout_s=60.0) as found:
        found.each(does.add)
        found.tell(1, does.close)
        found.answer(1)
        answers = found.each(does.add)
    assert answers == [
        Failed("PeerGone", "rank tp=1 is gone"),
        Failed("PeerLost", "this rank has left the group"),
    ]


def test_memory_of_other_ranks_is_refused() -> None:
    fd = make_segment(2)
    for config in (
        RankConfig(model_dir="", tp=3, tensor_fd=fd),
        RankConfig(model_dir="", tp=2, tp_rank=2, tensor_fd=fd),
    ):
        with pytest.raises(Unavailable):
            ShmGroup.open(config)
    with pytest.raises(Unavailable):
        make_segment(65)
