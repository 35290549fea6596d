"""What a replica does with requests, step by step."""

import math

import pytest

from radixmesh.blocks import pack_ids
from tests.fakes.oracle import oracle_output
from tests.fakes.replica import EOS_ID, ORDINARY, FakeReplica, add
from worker.engine.engine import run_step
from worker.request import LENGTH, STOP_TOKEN, Answer, Cancel, Flush, Sampling


def sampling(**values: object) -> Sampling:
    return Sampling(**{"seed": 1, "max_tokens": 8, "ignore_eos": True, **values})  # type: ignore[arg-type]


def test_a_request_gets_its_ids_one_a_step_and_ends_at_max_tokens() -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13)))
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 13), ORDINARY, 8)
    assert replica.finishes == {1: LENGTH}
    assert replica.step == 8
    assert replica.accepted == [1]


def test_running_requests_decode_together() -> None:
    replica = FakeReplica(max_batched_tokens=100)
    replica.turn(*(add(number, [number + 2] * 10) for number in range(1, 5)))
    replica.finish()
    assert replica.step == 8
    assert all(len(plan.rows) == 4 for plan in replica.plans)


def test_a_long_prompt_is_computed_in_chunks_behind_the_decoding_ones() -> None:
    replica = FakeReplica(max_batched_tokens=10)
    replica.turn(add(1, [5, 6]))
    replica.turn(add(2, [3] * 30))
    replica.finish()
    sizes = [[len(row.ids) for row in plan.rows] for plan in replica.plans]
    assert sizes[1:5] == [[1, 9], [1, 9], [1, 9], [1, 3]]
    assert replica.outputs[2] == oracle_output([3] * 30, ORDINARY, 8)


def test_a_step_computes_no_more_ids_than_its_budget() -> None:
    replica = FakeReplica(max_batched_tokens=7)
    replica.turn(*(add(number, [number + 3] * 11) for number in range(6)))
    replica.finish()
    assert max(sum(len(row.ids) for row in plan.rows) for plan in replica.plans) == 7


def test_a_second_turn_computes_only_what_is_new() -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13)))
    replica.finish()
    conversation = [*range(3, 13), *replica.outputs[1], 30, 31]
    replica.turn(add(2, conversation))
    assert replica.started[2].cached_tokens == 16
    replica.finish()
    assert replica.outputs[2] == oracle_output(conversation, ORDINARY, 8)


def test_a_block_can_be_found_from_the_step_on_that_fills_it() -> None:
    replica = FakeReplica()
    blocks = []
    for step in range(7):
        replica.turn(*([] if step else [add(1, [3, 4, 5])]))
        blocks.append(len(replica.mirror.parents))
    assert blocks == [0, 1, 1, 1, 1, 2, 2]


def test_one_id_is_computed_even_when_the_whole_prompt_is_cached() -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 11)))
    replica.finish()
    replica.turn(add(2, range(3, 11)))
    assert replica.started[2].cached_tokens == 4
    replica.finish()
    assert replica.outputs[2] == replica.outputs[1]


def test_another_tenant_finds_nothing() -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13), salt="a"))
    replica.finish()
    replica.turn(add(2, range(3, 13), salt="b"))
    assert replica.started[2].cached_tokens == 0


def test_a_journal_goes_on_at_the_next_position_and_counts_from_the_prompt_s_end() -> None:
    whole = oracle_output(range(3, 13), ORDINARY, 8)
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13), output=whole[:5]))
    replica.finish()
    assert replica.starts[1] == 5
    assert replica.outputs[1] == whole[5:]


@pytest.mark.parametrize("length", [8, 9])
def test_a_journal_at_the_limit_ends_at_once(length: int) -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13), output=[5] * length))
    assert replica.accepted == [1]
    assert replica.finishes == {1: LENGTH}
    assert replica.outputs[1] == []
    assert replica.starts[1] == length
    assert replica.scheduler.idle


def test_a_journal_that_ends_in_a_stop_id_ends_at_once() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3, 4], output=[5, 9], sampling=sampling(stop_ids=(9,))))
    assert replica.finishes == {1: STOP_TOKEN}


def test_a_prompt_that_ends_in_a_stop_id_does_not() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3, 9], sampling=sampling(stop_ids=(9,))))
    assert not replica.scheduler.idle


def test_output_ends_with_the_model_s_end_id() -> None:
    replica = FakeReplica(eos_after=3)
    replica.turn(add(1, [3, 4], sampling=sampling(ignore_eos=False)))
    replica.finish()
    assert replica.outputs[1] == [*oracle_output([3, 4], ORDINARY, 3), EOS_ID]
    assert replica.finishes[1] == STOP_TOKEN


def test_output_ends_with_a_stop_id_of_the_request() -> None:
    expected = oracle_output([3, 4], ORDINARY, 8)
    stop = expected[4]
    replica = FakeReplica()
    replica.turn(add(1, [3, 4], sampling=sampling(stop_ids=(stop,))))
    replica.finish()
    assert replica.outputs[1] == expected[: expected.index(stop) + 1]
    assert replica.finishes[1] == STOP_TOKEN


def test_ignore_eos_goes_on_to_max_tokens() -> None:
    replica = FakeReplica(eos_after=3)
    replica.turn(add(1, [3, 4]))
    replica.finish()
    assert len(replica.outputs[1]) == 8


def test_no_end_is_drawn_before_min_tokens() -> None:
    replica = FakeReplica(eos_after=2)
    replica.turn(add(1, [3, 4], sampling=sampling(ignore_eos=False, min_tokens=6)))
    replica.finish()
    assert len(replica.outputs[1]) == 6
    assert EOS_ID not in replica.outputs[1][:5]
    assert replica.finishes[1] == STOP_TOKEN


def test_output_ends_at_the_context_length() -> None:
    replica = FakeReplica(max_model_len=16)
    replica.turn(add(1, range(3, 13), sampling=sampling(max_tokens=100)))
    replica.finish()
    assert len(replica.outputs[1]) == 6
    assert replica.finishes[1] == LENGTH


def test_a_lone_request_may_fill_the_whole_kv_cache() -> None:
    replica = FakeReplica(kv_blocks=4, max_model_len=1000)
    replica.turn(add(1, range(3, 13), sampling=sampling(max_tokens=100)))
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 13), ORDINARY, 6)
    assert replica.finishes[1] == LENGTH


def test_logprobs_are_columns_with_nan_where_nobody_asked() -> None:
    replica = FakeReplica()
    output = replica.turn(add(1, [3]), add(2, [4], sampling=sampling(logprobs=True)))
    assert math.isnan(output.logprobs[0])
    assert -1 < output.logprobs[1] <= 0


def test_logprobs_are_empty_when_nobody_asked() -> None:
    replica = FakeReplica()
    assert replica.turn(add(1, [3]), add(2, [4])).logprobs == []


def test_a_cancelled_request_frees_its_blocks_in_the_next_step_and_leaves_full_ones() -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13)))
    output = replica.turn(Cancel([1]))
    assert output.request_ids == []
    assert replica.load.running == 0
    assert replica.load.free_blocks == 64
    assert len(replica.mirror.parents) == 2


def test_a_waiting_request_can_be_cancelled() -> None:
    replica = FakeReplica(max_running=1)
    replica.turn(add(1, [3]), add(2, [4]), add(3, [5]))
    replica.turn(Cancel([2]))
    replica.finish()
    assert replica.finishes.keys() == {1, 3}
    assert replica.load.waiting == 0


def test_cancels_of_unknown_and_ended_requests_change_nothing() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3, 4]), Cancel([77]))
    replica.finish()
    replica.turn(Cancel([1, 1, 77]))
    assert replica.ends == {1: 1}


def test_a_cancel_meets_its_own_request_only() -> None:
    replica = FakeReplica()
    replica.turn(*(add(number, [number]) for number in (3, 30, 31)))
    replica.turn(Cancel([3]))
    replica.finish()
    assert replica.finishes.keys() == {30, 31}


def test_a_second_request_with_a_number_in_use_leaves_the_first_alone() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3, 4]), add(1, [9, 9]))
    replica.finish()
    assert replica.outputs[1] == oracle_output([3, 4], ORDINARY, 8)
    assert replica.ends == {1: 1}


def test_a_deadline_is_judged_by_the_record_s_clock() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3], timeout_ms=5), add(2, [4]), now_us=1_000_000)
    replica.turn(now_us=1_004_999)
    assert replica.failed == {}
    replica.turn(now_us=1_005_000)
    assert replica.failed[1].reason == "DEADLINE_EXCEEDED"
    replica.finish()
    assert replica.ends == {1: 1, 2: 1}


def test_a_deadline_passes_in_the_queue_too() -> None:
    replica = FakeReplica(max_running=1)
    replica.turn(add(1, [3]), add(2, [4], timeout_ms=1), add(3, [5], timeout_ms=2), now_us=0)
    replica.turn(now_us=1_000)
    assert replica.failed.keys() == {2}
    replica.turn(now_us=2_000)
    assert replica.failed.keys() == {2, 3}
    assert replica.load.waiting == 0


def test_the_wait_is_told_in_microseconds_when_the_prefill_begins() -> None:
    replica = FakeReplica(max_running=1)
    replica.turn(add(1, [3], sampling=sampling(max_tokens=1)), add(2, [4]), now_us=100)
    replica.turn(now_us=350)
    assert replica.started[1].waited_us == 0
    assert replica.started[2].waited_us == 250


def test_higher_priority_goes_first_and_equals_go_by_arrival() -> None:
    replica = FakeReplica(max_running=1)
    short = sampling(max_tokens=1)
    replica.turn(add(1, [3], sampling=short))
    replica.turn(
        add(2, [4], sampling=short),
        add(3, [5], sampling=short),
        add(4, [6], sampling=short, priority=1),
    )
    replica.finish()
    assert list(replica.started) == [1, 4, 2, 3]


def test_a_full_queue_refuses_and_leaves_the_others() -> None:
    replica = FakeReplica(max_running=1, max_waiting=2)
    replica.turn(*(add(number, [number + 2]) for number in range(1, 6)))
    assert {one: failed.reason for one, failed in replica.failed.items()} == {
        4: "QUEUE_FULL",
        5: "QUEUE_FULL",
    }
    replica.finish()
    assert replica.finishes.keys() == {1, 2, 3}


def test_under_pressure_the_latest_request_waits_again_and_loses_nothing() -> None:
    replica = FakeReplica(kv_blocks=8, max_running=4)
    long = sampling(max_tokens=14)
    prompts = {number: [number + 3] * 8 for number in (1, 2, 3)}
    replica.turn(*(add(number, prompt, sampling=long) for number, prompt in prompts.items()))
    waiting = []
    while not replica.scheduler.idle:
        replica.turn()
        waiting.append([one.request_id for one in replica.scheduler._waiting])
    assert [3] in waiting
    assert all(1 not in some for some in waiting)
    for number, prompt in prompts.items():
        assert replica.outputs[number] == oracle_output(prompt, ORDINARY, 14)
    assert len(replica.started) == 3


def test_nobody_joins_into_the_blocks_that_running_requests_need_next() -> None:
    replica = FakeReplica(kv_blocks=4)
    replica.turn(add(1, [3] * 8, sampling=sampling(max_tokens=2)), add(2, [4] * 8))
    assert (replica.load.running, replica.load.waiting) == (1, 1)
    replica.finish()
    assert replica.outputs[2] == oracle_output([4] * 8, ORDINARY, 8)


def test_a_flush_reports_what_left_and_running_requests_go_on() -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13)))
    replica.turn(Flush(token=7))
    assert replica.answers == [Answer(7, 2)]
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 13), ORDINARY, 8)
    assert replica.load.free_blocks == 64


def test_load_counts_what_is_still_to_be_computed() -> None:
    replica = FakeReplica(max_running=1, max_batched_tokens=10)
    replica.turn(add(5, range(3, 33)), add(9, range(13, 33)))
    load = replica.load
    assert (load.running, load.waiting) == (1, 1)
    assert load.uncached_tokens == 20 + 20
    assert load.last_request_id == 9
    assert load.free_blocks == 64 - 8
    replica.turn(Cancel([5, 9]))
    assert replica.load.uncached_tokens == 0


def test_load_counts_no_ids_that_the_cache_holds() -> None:
    replica = FakeReplica(max_running=1, max_batched_tokens=100)
    replica.turn(add(1, range(3, 23)), add(2, range(3, 23)))
    replica.turn(Cancel([2]))
    replica.turn(add(3, range(3, 25)))
    assert replica.load.uncached_tokens == 2


def test_load_counts_once_what_siblings_share_whether_they_wait_or_run() -> None:
    replica = FakeReplica(max_running=1, max_batched_tokens=8)
    replica.turn(add(1, range(20, 40)))
    replica.turn(add(2, range(3, 33)), add(3, range(3, 37)), add(4, range(3, 33)))
    alone = 4 + 30  # of the one that runs, and of the first sibling
    assert replica.load.uncached_tokens == alone + (34 - 28) + (30 - 28)
    replica.turn(Cancel([1]))
    replica.turn(add(5, range(3, 39)))
    assert (replica.load.running, replica.load.waiting) == (1, 3)
    before = replica.load.uncached_tokens
    replica.turn(Cancel([5]))
    replica.turn(Cancel([2, 3, 4]))
    assert before < 30 + 34 + 30 + 36
    assert replica.load.uncached_tokens == 0


def test_a_bad_request_fails_alone() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3, 4]), add(2, [39, 40]), add(3, [5, 6]))
    replica.finish()
    assert replica.failed[2].reason == "UNKNOWN_TOKEN"
    assert replica.accepted == [1, 3]
    assert replica.outputs[3] == oracle_output([5, 6], ORDINARY, 8)


def test_an_engine_that_draws_too_little_is_an_error_and_never_an_id() -> None:
    replica = FakeReplica()
    replica.scheduler.apply([add(1, [3])], now_us=0)
    plan = replica.scheduler.plan(0)
    result = run_step(replica.engine, plan)
    result.ids.clear()
    result.logprobs.clear()
    with pytest.raises(ValueError, match="drew"):
        replica.scheduler.commit(plan, result)


def test_ids_are_little_endian_on_the_wire() -> None:
    replica = FakeReplica()
    output = replica.turn(add(1, [3, 4]))
    assert output.token_ids == pack_ids(oracle_output([3, 4], ORDINARY, 1))
