"""Ranks of a replica over real sockets: same plans, same ids, or a typed end."""

import logging
import time
from collections.abc import Iterator, Sequence

import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.errors import RankDesync
from tests.fakes.oracle import oracle_output
from tests.fakes.rank_threads import RankThreads
from tests.fakes.replica import ORDINARY, add
from worker.group.carrier import PeerLost
from worker.group.mailbox import FrontGone
from worker.group.record import StepRecord
from worker.request import Cancel, Sampling, StepOutput

ENDLESS = Sampling(seed=1, max_tokens=100, ignore_eos=True)
SHAPES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)]


@pytest.fixture
def started() -> Iterator[list[RankThreads]]:
    replicas: list[RankThreads] = []
    yield replicas
    for replica in replicas:
        replica.close()


def gather(replica: RankThreads, count: int) -> dict[int, list[int]]:
    """Read outputs until so many requests have ended."""
    ids: dict[int, list[int]] = {}
    for output in replica.front.outputs():
        at = iter(unpack_ids(output.token_ids))
        for request_id, length, finish in zip(
            output.request_ids, output.counts, output.finishes, strict=True
        ):
            ids.setdefault(request_id, []).extend(next(at) for _ in range(length))
            count -= bool(finish)
        count -= len(output.failed)
        if count == 0:
            break
    return ids


@pytest.mark.parametrize(("pp", "tp"), SHAPES)
def test_any_shape_gives_the_oracle_s_ids_and_equal_digests(
    started: list[RankThreads], pp: int, tp: int
) -> None:
    replica = RankThreads(pp=pp, tp=tp, kv_blocks=40)
    started.append(replica)
    prompts: dict[int, Sequence[int]] = {
        number: [3 + number % 5] * (5 + 4 * number) for number in range(1, 13)
    }
    sampling = Sampling(seed=1, max_tokens=12, ignore_eos=True)
    for number, prompt in prompts.items():
        replica.front.send(add(number, prompt, sampling=sampling))
    ids = gather(replica, len(prompts))
    assert ids == {
        number: oracle_output(prompt, ORDINARY, 12) for number, prompt in prompts.items()
    }
    replica.close()
    assert len({turns.digest for turns in replica.turns}) == 1
    assert len({turns.step for turns in replica.turns}) == 1
    assert isinstance(replica.ends[0], FrontGone)
    assert all(isinstance(replica.ends[number], PeerLost) for number in range(1, pp * tp))


@pytest.mark.parametrize(("pp", "tp"), [(2, 2), (4, 1)])
def test_a_storm_of_cancels_leaves_every_rank_with_the_same_empty_state(
    started: list[RankThreads], pp: int, tp: int
) -> None:
    replica = RankThreads(pp=pp, tp=tp)
    started.append(replica)
    endless = Sampling(seed=1, max_tokens=100, ignore_eos=True)
    for number in range(1, 101):
        replica.front.send(add(number, [3 + number % 7] * (number % 20 + 1), sampling=endless))
        if number % 2 == 0:
            replica.front.send(Cancel([number]))
    replica.front.send(Cancel(list(range(1, 101))))
    replica.front.send(add(101, [5], sampling=Sampling(seed=1, max_tokens=1)))
    last = None
    for output in replica.front.outputs():
        last = output
        if 101 in output.request_ids:
            break
    assert last is not None
    assert (last.load.running, last.load.waiting, last.load.free_blocks) == (0, 0, 64)
    replica.close()
    assert len({turns.digest for turns in replica.turns}) == 1
    assert all(turns.idle for turns in replica.turns)


@pytest.mark.parametrize("where", ["tp=1", "pp=1:tp=0", "tp=0:pp=0"])
def test_a_rank_that_draws_other_ids_ends_the_replica_before_it_goes_on(
    started: list[RankThreads], where: str
) -> None:
    replica = RankThreads(pp=2, tp=2, faults=[f"desync@step=3:{where}"])
    started.append(replica)
    replica.front.send(add(1, [3, 4, 5]))
    outputs = list(replica.front.outputs())
    replica.join()
    assert len(outputs) == 4
    assert isinstance(replica.ends[0], RankDesync)
    assert all(isinstance(end, RankDesync | PeerLost) for end in replica.ends.values())
    assert len(replica.ends) == 4


@pytest.mark.parametrize("where", ["tp=1", "pp=1:tp=0", "pp=3:tp=0"])
@pytest.mark.parametrize("kind", ["drop", "alter", "reorder"])
def test_a_rank_that_was_told_another_request_ends_the_replica_within_seconds(
    started: list[RankThreads], caplog: pytest.LogCaptureFixture, kind: str, where: str
) -> None:
    caplog.set_level(logging.INFO)
    tp = 2 if where == "tp=1" else 1
    replica = RankThreads(pp=4 // tp, tp=tp, faults=[f"{kind}@request=5:{where}"])
    started.append(replica)
    for number in range(1, 9):
        replica.front.send(add(number, [3, 4, 5 + number], sampling=ENDLESS))
    began = time.monotonic()
    list(replica.front.outputs())
    replica.join()
    assert time.monotonic() - began < 5
    assert isinstance(replica.ends[0], RankDesync)
    assert all(isinstance(end, RankDesync | PeerLost) for end in replica.ends.values())
    assert_both_sides_are_in(caplog)


def assert_both_sides_are_in(caplog: pytest.LogCaptureFixture) -> None:
    """The log has the plan of the step at which two ranks differ, from both."""
    told = [vars(record) for record in caplog.records]
    [differ] = [record for record in told if record["msg"] == "plans differ"]

    def plan(record: dict[str, str]) -> list[str]:
        plans = record["plans"].split("; ")
        return [plan for plan in plans if plan.startswith(f"{differ['at']} ")]

    [ours] = plan(differ)
    others = [each for record in told if record["msg"] == "planned last" for each in plan(record)]
    assert set(others) - {ours}


def test_a_rank_that_misses_a_step_ends_the_replica_in_time(started: list[RankThreads]) -> None:
    replica = RankThreads(tp=2, faults=["skip@step=3:tp=1"], deadline_s=0.3)
    started.append(replica)
    replica.front.send(add(1, [3, 4, 5], sampling=ENDLESS))
    began = time.monotonic()
    list(replica.front.outputs())
    replica.join()
    assert time.monotonic() - began < 3
    assert isinstance(replica.ends[0], PeerLost)


def test_a_stage_that_misses_a_step_is_found_out(started: list[RankThreads]) -> None:
    replica = RankThreads(pp=4, faults=["skip@step=3:pp=2"])
    started.append(replica)
    for number in range(1, 9):
        replica.front.send(add(number, [3, 4, 5 + number], sampling=ENDLESS))
    list(replica.front.outputs())
    replica.join()
    assert isinstance(replica.ends[0], RankDesync)


@pytest.mark.parametrize("pp", [2, 4])
def test_a_cancel_in_any_micro_batch_leaves_every_stage_empty(
    started: list[RankThreads], pp: int
) -> None:
    replica = RankThreads(pp=pp)
    started.append(replica)
    for number in range(1, 2 * pp + 1):
        replica.front.send(add(number, [3 + number], sampling=ENDLESS))
    seen: set[int] = set()
    for output in replica.front.outputs():
        # Each is cancelled as soon as it runs: the micro-batches are at different steps.
        fresh = set(output.request_ids) - seen
        seen |= fresh
        if fresh:
            replica.front.send(Cancel(sorted(fresh)))
        if seen == set(range(1, 2 * pp + 1)) and output.load.running == output.load.waiting == 0:
            break
    # With the last step of the last request nothing is under way on any stage.
    replica.front.send(add(99, [3], sampling=Sampling(seed=1, max_tokens=1)))
    output = next(each for each in replica.front.outputs() if 99 in each.request_ids)
    assert output.load.free_blocks == 64
    replica.close()
    assert len({turns.digest for turns in replica.turns}) == 1
    assert all(turns.idle for turns in replica.turns)


def test_a_broken_follower_ends_the_replica(started: list[RankThreads]) -> None:
    replica = RankThreads(tp=2, faults=["raise@step=2:tp=1"])
    started.append(replica)
    replica.front.send(add(1, [3, 4, 5]))
    assert len(list(replica.front.outputs())) == 3
    replica.join()
    assert isinstance(replica.ends[0], PeerLost)
    assert isinstance(replica.ends[1], RuntimeError)


def test_a_follower_refuses_a_record_that_does_not_follow() -> None:
    replica = RankThreads(tp=2)
    turns = replica.turns[1]
    with pytest.raises(RankDesync, match="expected 0"):
        turns.begin(StepRecord(step=1, now_us=0, digest=turns.digest, inputs=[]))
    with pytest.raises(RankDesync, match="differ"):
        turns.begin(StepRecord(step=0, now_us=0, digest=turns.digest + 1, inputs=[]))
    replica.close()


def test_every_drained_mailbox_is_answered_even_when_nothing_came_of_it(
    started: list[RankThreads],
) -> None:
    replica = RankThreads()
    started.append(replica)
    for step in range(3):
        replica.front.send(Cancel([99]))
        output = replica.front.receive()
        assert isinstance(output, StepOutput)
        assert output.step == step
        assert output.accepted == []


@pytest.mark.parametrize("overlap", [False, True])
def test_load_brings_the_learned_rates(started: list[RankThreads], *, overlap: bool) -> None:
    replica = RankThreads(overlap=overlap, prefill_tokens_per_s=2000, decode_ms=2)
    started.append(replica)
    replica.front.send(add(1, [3] * 80, sampling=Sampling(seed=1, max_tokens=8, ignore_eos=True)))
    last = next(output for output in replica.front.outputs() if any(output.finishes))
    # A prefill whose time is counted to the step after it would be hundreds of times faster.
    assert 0 < last.load.prefill_rate < 20_000
    assert last.load.decode_step_s > 0
    assert last.load.last_request_id == 1
