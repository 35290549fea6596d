"""The line through the stages: activations of the right plan, results in order, typed ends."""

import signal

import pytest
import torch

from tests.fakes import tensor_ranks as does


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_activations_arrive_though_nobody_waits_for_them(dtype: str) -> None:
    shapes = [(1, 8), (3, 576)]
    with does.ranks(pp=2, dtype=dtype) as found:
        assert found.each(does.kinds) == [("Alone", "GlooStages")] * 2
        for step, shape in enumerate(shapes):
            found.tell(0, does.send, step, step, shape, dtype)
            assert found.answer(0) is None
        for step, shape in enumerate(shapes):
            found.tell(1, does.receive, step, shape)
            assert found.answer(1) == does.bits(does.numbers(step, 0, shape, dtype))


@pytest.mark.parametrize(("digest", "shape"), [(7, (2, 8)), (6, (3, 8)), (6, (1, 8))])
def test_desync_activations_of_another_plan_or_size_are_not_used(
    digest: int, shape: tuple[int, int]
) -> None:
    with does.ranks(pp=2) as found:
        found.tell(0, does.send, 6, 1, (2, 8), "float32")
        found.tell(1, does.receive, digest, shape)
        answer = found.answer(1)
    assert answer.kind == "RankDesync"
    assert "16 numbers of plan 0000000000000006" in answer.message


def test_results_of_any_length_reach_every_earlier_stage_in_order() -> None:
    drawn = [b"", b"abc", bytes(4088), bytes(range(256)) * 64, b"z"]
    with does.ranks(pp=3) as found:
        for number in (0, 1):
            found.tell(number, does.results, len(drawn))
        found.tell(2, does.publish, drawn)
        assert [found.answer(number) for number in range(3)] == [drawn, drawn, None]


@pytest.mark.parametrize("pp", [2, 3])
def test_a_pipeline_keeps_a_step_under_way_in_each_stage(pp: int) -> None:
    steps = 50
    expected = [
        does.bits(torch.full((1 + step % 3, 8), float(step + pp - 1))) for step in range(steps)
    ]
    with does.ranks(pp=pp) as found:
        assert found.each(does.relay, steps) == [expected] * pp


def test_stages_of_several_ranks_form_a_line_for_each() -> None:
    with does.ranks(pp=2, tp=2, tensors="gloo") as found:
        assert found.each(does.kinds) == [("GlooGroup", "GlooStages")] * 4
        for tp_rank in range(2):
            found.tell(tp_rank, does.send, 1, tp_rank, (2, 8), "float32")
            found.tell(2 + tp_rank, does.receive, 1, (2, 8))
        for tp_rank in range(2):
            expected = does.bits(does.numbers(tp_rank, 0, (2, 8), "float32"))
            assert found.answer(2 + tp_rank) == expected
            assert found.answer(tp_rank) is None
        assert found.each(does.add) == [does.bits(torch.full((4,), 2.0))] * 4


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_stage_is_lost_after_the_deadline(fault: signal.Signals) -> None:
    with does.ranks(pp=2, step_timeout_s=0.5) as found:
        found.each(does.kinds)
        found.signal(0, fault)
        found.tell(1, does.receive, 1, (2, 8))
        assert found.answer(1).kind == "PeerLost"


def test_a_line_that_was_idle_for_longer_than_any_deadline_still_works() -> None:
    with does.ranks(pp=2, step_timeout_s=0.2) as found:
        assert all(waited > 0.4 for waited in found.each(does.idle, 0.4))
        assert found.each(does.relay, 3)[0] == found.each(does.relay, 3)[1]


def test_a_step_of_more_rows_than_any_may_have_is_refused_by_its_sender() -> None:
    with does.ranks(pp=2, max_batched_tokens=4, max_running=2) as found:
        found.tell(0, does.send, 1, 1, (4, 8), "float32")
        found.tell(1, does.receive, 1, (4, 8))
        assert found.answer(0) is None
        assert found.answer(1) == does.bits(does.numbers(1, 0, (4, 8), "float32"))
        found.tell(0, does.refused, (5, 8))
        assert found.answer(0) == "a step has at most 4 rows, got 5"


def test_what_a_stage_sent_before_it_left_is_read() -> None:
    with does.ranks(pp=2) as found:
        found.tell(1, does.publish, [b"one", b"two"])
        assert found.answer(1) is None
        found.tell(0, does.results, 1)
        assert found.answer(0) == [b"one"]
        found.tell(1, does.close)
        found.answer(1)
        found.tell(0, does.results, 1)
        assert found.answer(0) == [b"two"]
        found.tell(0, does.results, 1)
        assert found.answer(0).kind == "PeerLost"
