"""Steps are planned while earlier ones are computed, and no request notices."""

import pytest

from tests.fakes.oracle import oracle_output
from tests.fakes.replica import EOS_ID, ORDINARY, FakeReplica, add
from worker.request import LENGTH, STOP_TOKEN, Cancel, Flush, Pause, Sampling

FUTURES = {"depth": 2, "futures": True}
ENDLESS = Sampling(seed=1, max_tokens=100, ignore_eos=True)


def replica_of(**values: int) -> FakeReplica:
    return FakeReplica(**values)  # type: ignore[arg-type]


def test_an_overlapped_step_goes_on_from_the_ids_that_the_one_before_draws() -> None:
    replica = replica_of(**FUTURES)
    replica.turn(add(1, [3, 4]), add(2, [5, 6, 7]))
    replica.turn()
    first, second = replica.plans
    assert [row.future for row in first.rows] == [-1, -1]
    assert [row.future for row in second.rows] == [0, 1]
    assert [list(row.ids) for row in second.rows] == [[0], [0]]
    assert [(row.start, row.output_position) for row in second.rows] == [(2, 1), (3, 1)]
    replica.finish()
    assert replica.outputs[1] == oracle_output([3, 4], ORDINARY, 8)
    assert replica.outputs[2] == oracle_output([5, 6, 7], ORDINARY, 8)


def test_overlapping_costs_one_turn_and_no_step() -> None:
    replica = replica_of(**FUTURES)
    replica.turn(add(1, [3, 4]))
    replica.finish()
    assert [len(plan.rows) for plan in replica.plans] == [1] * 8 + [0]
    assert replica.finishes == {1: LENGTH}


def test_a_future_counts_the_draws_of_the_step_before_and_not_its_rows() -> None:
    replica = replica_of(**FUTURES, max_batched_tokens=8)
    replica.turn(add(1, [3] * 20), add(2, [4], priority=1))
    replica.turn()
    first, second = replica.plans
    assert [row.sampled for row in first.rows] == [True, False]
    assert [(row.request_id, row.future) for row in second.rows] == [(2, 0), (1, -1)]
    replica.finish()
    assert replica.outputs[1] == oracle_output([3] * 20, ORDINARY, 8)


def test_an_id_is_known_again_after_a_turn_that_planned_nothing() -> None:
    replica = replica_of(**FUTURES)
    replica.turn(add(1, [3], sampling=Sampling(seed=1, max_tokens=2)))
    replica.turn()
    replica.turn(add(2, [5, 6]))
    replica.turn(Cancel([1]))
    replica.finish()
    assert replica.outputs[2] == oracle_output([5, 6], ORDINARY, 8)


def test_what_is_drawn_beyond_a_stop_id_is_dropped() -> None:
    expected = oracle_output([3, 4], ORDINARY, 8)
    stop = expected[3]
    replica = replica_of(**FUTURES)
    sampling = Sampling(seed=1, max_tokens=8, ignore_eos=True, stop_ids=(stop,))
    replica.turn(add(1, [3, 4], sampling=sampling))
    replica.finish()
    end = expected.index(stop) + 1
    assert replica.outputs[1] == expected[:end]
    assert sum(len(plan.rows) for plan in replica.plans) == end + 1
    assert (replica.ends[1], replica.finishes[1]) == (1, STOP_TOKEN)


def test_ends_are_banned_by_the_position_that_is_drawn_even_from_a_future_id() -> None:
    replica = FakeReplica(depth=2, futures=True, eos_after=1)
    replica.turn(add(1, [3, 4], sampling=Sampling(seed=1, max_tokens=8, min_tokens=5)))
    replica.finish()
    assert len(replica.outputs[1]) == 5
    assert replica.outputs[1][-1] == EOS_ID


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_stages_share_the_decoding_requests_between_their_steps(depth: int) -> None:
    replica = FakeReplica(depth=depth)
    replica.turn(*(add(number, [number + 2], sampling=ENDLESS) for number in range(1, 9)))
    for _ in range(5 * depth):
        replica.turn()
    share = -(-8 // depth)
    for start in range(2 * depth, 4 * depth):
        window = replica.plans[start : start + depth]
        served = sorted(row.request_id for plan in window for row in plan.rows)
        assert max(len(plan.rows) for plan in window) <= share
        assert len(served) == len(set(served))
    assert min(len(ids) for ids in replica.outputs.values()) >= 3


@pytest.mark.parametrize(("depth", "running"), [(4, 5), (4, 3), (3, 7), (2, 3)])
def test_no_stage_is_idle_while_there_are_requests_enough(depth: int, running: int) -> None:
    replica = FakeReplica(depth=depth)
    replica.turn(*(add(one, [one + 2], sampling=ENDLESS) for one in range(1, running + 1)))
    for _ in range(6 * depth):
        replica.turn()
    idle = [plan.step for plan in replica.plans[depth:] if not plan.rows]
    assert bool(idle) is (running < depth)
    counts = [len(ids) for ids in replica.outputs.values()]
    assert max(counts) - min(counts) <= 2


def test_requests_that_fell_into_one_step_are_spread_again() -> None:
    replica = FakeReplica(depth=2)
    replica.turn(*(add(one, [one + 2], sampling=ENDLESS) for one in (1, 2)))
    replica.turn()
    replica.turn(*(add(one, [one + 2], sampling=ENDLESS) for one in (3, 4, 5, 6)))
    for _ in range(8):
        replica.turn()
    assert [len(plan.rows) for plan in replica.plans[-4:]] == [3, 3, 3, 3]


def test_an_overlapped_replica_goes_on_with_all_its_requests_after_a_pause() -> None:
    replica = FakeReplica(depth=2, futures=True)
    replica.turn(*(add(one, [one + 2]) for one in (1, 2, 3)))
    replica.turn(Pause(4, paused=True))
    replica.turn(Pause(5, paused=False))
    assert len(replica.plans[-1].rows) == 3


def test_nobody_is_retracted_for_an_id_that_nothing_follows() -> None:
    replica = FakeReplica(kv_blocks=5, depth=2, futures=True)
    short = Sampling(seed=1, max_tokens=2, ignore_eos=True)
    replica.turn(*(add(one, [one + 2] * 7, sampling=short) for one in (1, 2)))
    while not replica.turns.idle:
        assert replica.load.waiting == 0
        replica.turn()
    assert len(replica.finishes) == 2


def test_chunks_of_one_prompt_follow_each_other_through_the_stages() -> None:
    replica = FakeReplica(depth=3, max_batched_tokens=8)
    replica.turn(add(1, range(3, 33)))
    replica.turn()
    replica.turn()
    assert [plan.rows[0].start for plan in replica.plans] == [0, 8, 16]
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 33), ORDINARY, 8)


@pytest.mark.parametrize("slot", range(4))
def test_a_cancel_drops_a_request_at_once_whichever_step_has_it(slot: int) -> None:
    replica = FakeReplica(depth=4)
    replica.turn(*(add(number, [number + 2], sampling=ENDLESS) for number in range(1, 5)))
    for _ in range(8 + slot):
        replica.turn()
    told = len(replica.outputs[1])
    replica.turn(Cancel([1]))
    assert replica.load.running == 3
    assert all(row.request_id != 1 for row in replica.plans[-1].rows)
    replica.turn(Cancel([2, 3, 4]))
    while not replica.turns.idle:
        replica.turn()
    assert len(replica.outputs[1]) <= told + 1
    load = replica.load
    assert (load.running, load.waiting, load.uncached_tokens) == (0, 0, 0)
    assert load.free_blocks == replica.cache.total


def test_a_cancel_storm_leaves_equal_ranks_and_no_request() -> None:
    ranks = [FakeReplica(depth=4, kv_blocks=24, max_running=6) for _ in range(2)]
    for rank in ranks:
        for number in range(1, 201):
            inputs = [add(number, [3 + number % 7] * (number % 20 + 1), sampling=ENDLESS)]
            cancels = [Cancel([number - number * 7 % 23])] if number % 2 else []
            rank.turn(*inputs, *cancels, now_us=number)
        rank.turn(Cancel(list(range(1, 201))))
        rank.finish()
    assert ranks[0].turns.digest == ranks[1].turns.digest
    assert ranks[0].outputs == ranks[1].outputs
    assert (ranks[0].load.running, ranks[0].load.waiting) == (0, 0)
    assert ranks[0].load.free_blocks == 24


def test_a_deadline_ends_a_request_whose_step_is_under_way() -> None:
    replica = replica_of(**FUTURES)
    replica.turn(add(1, [3, 4], timeout_ms=1, sampling=ENDLESS), now_us=0)
    replica.turn(now_us=999)
    output = replica.turn(now_us=1000)
    assert [one.reason for one in output.failed] == ["DEADLINE_EXCEEDED"]
    assert output.request_ids == []
    assert replica.load.free_blocks == replica.cache.total
    replica.finish()
    assert replica.ends == {1: 1}


@pytest.mark.parametrize(("depth", "futures"), [(2, True), (2, False), (3, False)])
def test_who_is_retracted_and_back_takes_no_result_of_its_former_stay(
    depth: int, futures: bool
) -> None:
    replica = FakeReplica(kv_blocks=8, max_running=4, depth=depth, futures=futures)
    prompts = {number: [number + 3] * 8 for number in (1, 2, 3)}
    long = Sampling(seed=1, max_tokens=14, ignore_eos=True)
    replica.turn(*(add(number, prompt, sampling=long) for number, prompt in prompts.items()))
    retracted = 0
    while not replica.turns.idle:
        before = replica.load.waiting
        replica.turn()
        retracted += replica.load.waiting > before
    assert retracted
    for number, prompt in prompts.items():
        assert replica.outputs[number] == oracle_output(prompt, ORDINARY, 14)


@pytest.mark.parametrize("budget", [6, 64])
def test_who_is_back_at_once_takes_no_result_of_its_former_stay(budget: int) -> None:
    prompt = [3, 4, 5, 6, 7] * 4
    replica = FakeReplica(depth=4, max_running=1, max_batched_tokens=budget)
    replica.turn(add(1, prompt))
    replica.turn(add(2, [9], priority=1))
    replica.turn(Cancel([2]))
    assert replica.plans[-1].rows[0].request_id == 1
    assert replica.outputs == {}
    replica.finish()
    assert replica.outputs[1] == oracle_output(prompt, ORDINARY, 8)


def test_waits_that_straddle_the_deadline_end_alike_on_every_rank() -> None:
    ranks = [FakeReplica(depth=2, kv_blocks=24, max_running=2) for _ in range(2)]
    for rank in ranks:
        short = Sampling(seed=1, max_tokens=2, ignore_eos=True)
        rank.turn(
            *(add(one, [one] * 9, sampling=short, timeout_ms=8 + one) for one in range(3, 33))
        )
        for step in range(1, 45):
            rank.turn(now_us=step * 997)
        rank.finish()
    assert ranks[0].turns.digest == ranks[1].turns.digest
    assert ranks[0].failed == ranks[1].failed
    assert ranks[0].finishes.keys() | ranks[0].failed.keys() == set(range(3, 33))
    assert ranks[0].finishes
    assert ranks[0].failed


def test_a_lone_request_fills_the_cache_to_its_last_block() -> None:
    replica = FakeReplica(kv_blocks=4, max_model_len=1000, depth=2, futures=True)
    replica.turn(add(1, range(3, 13), sampling=ENDLESS))
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 13), ORDINARY, 6)


def test_a_flush_under_a_step_loses_no_id_and_no_block() -> None:
    replica = FakeReplica(depth=2, futures=True, max_batched_tokens=6)
    replica.turn(add(1, range(3, 23)))
    replica.turn(Flush(token=7))
    replica.turn(Flush(token=8))
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 23), ORDINARY, 8)
    assert replica.load.free_blocks == replica.cache.total


def test_a_table_that_a_plan_holds_never_changes() -> None:
    replica = FakeReplica(depth=2, futures=True)
    tables = []
    prompt = list(range(3, 16))
    replica.turn(*(add(number, prompt, sampling=ENDLESS) for number in (1, 2)))
    for _ in range(20):
        replica.turn()
        tables += [(row.blocks, list(row.blocks)) for row in replica.plans[-1].rows]
    assert all(held == copy for held, copy in tables)
    shared = {id(held) for held, _ in tables}
    assert len(shared) < len(tables) / 2
