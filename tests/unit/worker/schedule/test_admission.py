"""Who gets the next place: by priority, age, cached prefix; and who waits for whom."""

import pytest

from tests.fakes.oracle import oracle_output
from tests.fakes.replica import ORDINARY, FakeReplica, add
from worker.kvcache.keyed import KeyedIds
from worker.request import Cancel, Flush, Sampling
from worker.schedule.waiting import WINDOW

ONE = Sampling(seed=1, max_tokens=1)
ENDLESS = Sampling(seed=1, max_tokens=100, ignore_eos=True)
PREFIX = list(range(3, 15))


def computed(replica: FakeReplica) -> int:
    return sum(len(row.ids) for plan in replica.plans for row in plan.rows)


def warmed(**values: int) -> FakeReplica:
    """One place, taken by request 1; the cache holds PREFIX."""
    replica = FakeReplica(max_running=1, **values)  # type: ignore[arg-type]
    replica.turn(add(99, PREFIX, sampling=ONE))
    replica.turn(add(1, [30], sampling=Sampling(seed=1, max_tokens=2, ignore_eos=True)))
    return replica


def count_probes(replica: FakeReplica) -> list[KeyedIds]:
    """Note from now on whose prefix is looked up."""
    probes: list[KeyedIds] = []
    probe = replica.cache.probed_blocks

    def noted(keyed: KeyedIds, max_blocks: int) -> int:
        probes.append(keyed)
        return probe(keyed, max_blocks)

    replica.cache.probed_blocks = noted  # type: ignore[method-assign]
    return probes


def test_the_longest_cached_prefix_goes_first() -> None:
    replica = warmed()
    replica.turn(
        add(2, [20] * 9, sampling=ONE),
        add(3, [*PREFIX[:8], 20], sampling=ONE),
        add(4, [*PREFIX, 20], sampling=ONE),
    )
    replica.finish()
    assert list(replica.started) == [99, 1, 4, 3, 2]


def test_first_come_first_served_where_that_is_asked() -> None:
    replica = warmed(prefix_first=False)
    replica.turn(add(2, [20] * 9, sampling=ONE), add(3, [*PREFIX, 20], sampling=ONE))
    replica.finish()
    assert list(replica.started) == [99, 1, 2, 3]


def test_priority_comes_before_the_prefix() -> None:
    replica = warmed()
    replica.turn(add(2, [*PREFIX, 20], sampling=ONE), add(3, [20], sampling=ONE, priority=1))
    replica.finish()
    assert list(replica.started) == [99, 1, 3, 2]


def test_who_has_waited_long_goes_before_every_prefix() -> None:
    replica = warmed(ageing_us=1000)
    replica.turn(add(1000, [31], sampling=ENDLESS), now_us=0)
    replica.turn(add(2, [20] * 9, sampling=ONE), now_us=10)
    replica.turn(add(3, [*PREFIX, 20], sampling=ONE), now_us=20)
    replica.turn(Cancel([1000]), now_us=1010)
    replica.turn(now_us=1010)
    assert list(replica.started)[-2:] == [2, 3]


def test_nobody_starves_under_a_stream_of_better_prefixes() -> None:
    replica = warmed(ageing_us=30)
    replica.turn(add(2, [20] * 9, sampling=ONE), now_us=2)
    for step in range(3, 60):
        replica.turn(add(100 + step, [*PREFIX, 5 + step % 30], sampling=ONE), now_us=step)
    waited = replica.started[2].waited_us
    assert waited == 30


def test_a_stream_that_has_begun_goes_before_every_prefix() -> None:
    replica = warmed()
    stream = oracle_output([20] * 9, ORDINARY, 3)
    replica.turn(
        add(3, [*PREFIX, 20], sampling=ONE),
        add(2, [20] * 9, output=stream[:2], sampling=Sampling(seed=1, max_tokens=3)),
    )
    replica.finish()
    assert list(replica.started) == [99, 1, 2, 3]


def test_a_long_queue_is_looked_at_no_further_than_a_short_one() -> None:
    looks = []
    for length in (WINDOW, 20 * WINDOW):
        replica = warmed(max_waiting=1000)
        replica.turn(*(add(10 + one, [20, one % 37 + 3, 5, 6, 7]) for one in range(length)))
        probes = count_probes(replica)
        replica.turn()
        looks.append(len(probes))
    assert looks[0] == looks[1] > 0


def test_a_burst_of_short_requests_starts_in_one_step() -> None:
    count = 3 * WINDOW
    replica = FakeReplica(max_running=count, max_batched_tokens=1000, kv_blocks=4 * count)
    replica.turn(*(add(one, [one % 37 + 3, one // 37 + 3]) for one in range(count)))
    assert len(replica.started) == count


def test_a_full_replica_does_not_look_at_its_queue() -> None:
    replica = FakeReplica(max_running=1)
    replica.turn(add(1, [3], sampling=ENDLESS), *(add(one, [one + 2] * 9) for one in range(2, 9)))
    probes = count_probes(replica)
    replica.turn()
    assert probes == []


@pytest.mark.parametrize(("depth", "futures"), [(1, False), (2, True), (2, False)])
def test_siblings_that_arrive_together_compute_their_prefix_once(depth: int, futures: bool) -> None:
    replica = FakeReplica(
        max_running=16, max_batched_tokens=64, kv_blocks=256, depth=depth, futures=futures
    )
    prompts = {number: [*range(3, 39), number % 30 + 3, number] for number in range(1, 17)}
    replica.turn(*(add(number, prompt, sampling=ONE) for number, prompt in prompts.items()))
    replica.finish()
    assert computed(replica) == 38 + 15 * 2
    assert replica.step <= 3 + depth
    for number, prompt in prompts.items():
        assert replica.outputs[number] == oracle_output(prompt, ORDINARY, 1)


def test_choices_of_one_prompt_share_all_its_blocks_but_the_last_partial_one() -> None:
    replica = FakeReplica(max_batched_tokens=64)
    prompt = list(range(3, 33))
    choices = {
        number: Sampling(seed=1, choice=number - 1, max_tokens=4, ignore_eos=True)
        for number in range(1, 5)
    }
    replica.turn(*(add(number, prompt, sampling=one) for number, one in choices.items()))
    replica.turn()
    assert computed(replica) == 30 + 3 * 2 + 1
    assert [replica.started[number].cached_tokens for number in choices] == [0, 28, 28, 28]
    tables = [row.blocks for row in replica.plans[-1].rows]
    assert all(table[:7] == tables[0][:7] for table in tables)
    assert len({table[7] for table in tables}) == 4
    replica.finish()
    for number in choices:
        assert replica.outputs[number] == oracle_output(prompt, ORDINARY, 4)


def test_who_waits_for_a_sibling_holds_nobody_up() -> None:
    replica = FakeReplica(max_batched_tokens=14)
    replica.turn(add(1, PREFIX), add(2, PREFIX), add(3, [20, 21]))
    assert [row.request_id for row in replica.plans[0].rows] == [1, 3]


def test_a_sibling_whose_forerunner_is_cancelled_goes_on_by_itself() -> None:
    replica = FakeReplica(max_batched_tokens=8)
    replica.turn(add(1, range(3, 33)), add(2, range(3, 33)))
    assert replica.load.waiting == 1
    replica.turn(Cancel([1]))
    assert replica.started[2].cached_tokens == 8
    replica.finish()
    assert replica.outputs[2] == oracle_output(range(3, 33), ORDINARY, 8)


def test_nobody_waits_longer_than_the_ageing_for_a_sibling_that_does_not_get_on() -> None:
    replica = FakeReplica(block_tokens=16, max_batched_tokens=4, ageing_us=5)
    shared = [3] * 40
    replica.turn(add(1, shared))
    # They leave one id a step to the first: far too little for a block.
    replica.turn(*(add(one, [one], priority=2, sampling=ENDLESS) for one in (11, 12, 13)))
    for now_us in range(10, 20):
        arrival = [add(2, shared, priority=1)] if now_us == 10 else []
        replica.turn(*arrival, now_us=now_us)
    assert replica.started[2].waited_us == 5
    assert replica.started[2].cached_tokens == 0


def test_a_sibling_that_gets_on_is_waited_for_beyond_the_ageing() -> None:
    replica = FakeReplica(block_tokens=4, max_batched_tokens=7, ageing_us=5)
    shared = [3] * 42
    replica.turn(add(1, shared))
    # They leave four ids a step to the first: one block of ten.
    replica.turn(*(add(one, [one], priority=2, sampling=ENDLESS) for one in (11, 12, 13)))
    for now_us in range(10, 30):
        arrival = [add(2, shared, priority=1)] if now_us == 10 else []
        replica.turn(*arrival, now_us=now_us)
    assert replica.started[2].cached_tokens == 40
    assert replica.started[2].waited_us > 5


def test_nobody_waits_for_a_prefix_that_will_not_be_shared_after_a_flush() -> None:
    replica = FakeReplica(max_batched_tokens=8)
    shared = list(range(3, 33))
    replica.turn(add(1, shared))
    replica.turn(Flush(7), add(2, shared[:9], sampling=ONE, priority=1))
    replica.turn(add(3, shared, priority=1))
    assert replica.started[3].cached_tokens == 8
    replica.finish()
    assert replica.outputs[1] == replica.outputs[3] == oracle_output(shared, ORDINARY, 8)


def test_a_higher_priority_takes_the_place_of_the_last_of_a_lower_one() -> None:
    replica = FakeReplica(max_running=2)
    replica.turn(add(1, [3] * 6), add(2, [4] * 6))
    replica.turn()
    replica.turn(add(3, [5] * 6, priority=1))
    assert {row.request_id for row in replica.plans[-1].rows} == {1, 3}
    replica.finish()
    for number, token in ((1, 3), (2, 4), (3, 5)):
        assert replica.outputs[number] == oracle_output([token] * 6, ORDINARY, 8)
    assert len(replica.started) == 3


def test_a_higher_priority_takes_the_blocks_of_lower_ones() -> None:
    replica = FakeReplica(kv_blocks=12, max_running=8)
    replica.turn(add(1, [3] * 14), add(2, [4] * 14), add(3, [5] * 6))
    replica.turn(add(4, [6] * 30, priority=1))
    assert 4 in replica.started
    replica.finish()
    for number, prompt in ((1, [3] * 14), (2, [4] * 14), (3, [5] * 6), (4, [6] * 30)):
        assert replica.outputs[number] == oracle_output(prompt, ORDINARY, 8)


def test_nobody_gives_way_for_one_that_would_not_fit_all_the_same() -> None:
    replica = FakeReplica(kv_blocks=12, max_running=8)
    replica.turn(add(1, [3] * 24, priority=2, sampling=ENDLESS), add(2, [4] * 6))
    replica.turn(add(3, [5] * 30, priority=1))
    assert (replica.load.running, replica.load.waiting) == (2, 1)


def test_equal_priorities_take_nothing_from_each_other() -> None:
    replica = FakeReplica(max_running=1)
    replica.turn(add(1, [3] * 6, priority=1))
    replica.turn(add(2, [4] * 6, priority=1), add(3, [5] * 6))
    while 2 not in replica.started:
        replica.turn()
    assert replica.ends[1] == 1


def test_a_higher_priority_joins_past_a_long_prefill_of_a_lower_one() -> None:
    replica = FakeReplica(max_batched_tokens=8)
    replica.turn(add(1, [3] * 100))
    replica.turn(add(2, [4] * 6, priority=1))
    assert [(row.request_id, len(row.ids)) for row in replica.plans[-1].rows] == [(2, 6), (1, 2)]
