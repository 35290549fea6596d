"""A replica that is paused computes nothing and loses nothing; new weights begin at once."""

import json
from pathlib import Path

import pytest

from tests.fakes.oracle import oracle_output, turned
from tests.fakes.replica import ORDINARY, FakeReplica, add
from worker.request import Add, Answer, Cancel, Flush, Pause, Probe, Sampling, Weights

PACES = [(1, False), (2, True), (3, False)]
ENDLESS = Sampling(seed=1, max_tokens=100, ignore_eos=True)


def weights_in(folder: Path, *, size: int = 40) -> Weights:
    """A model whose vocabulary is that of the fake replica."""
    folder.mkdir()
    vocab = {f"t{number}": number for number in range(3, size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "eos_token_id": 2}))
    return Weights(5, str(folder), "v2")


@pytest.mark.parametrize(("depth", "futures"), PACES)
def test_a_pause_is_answered_when_no_step_is_under_way(depth: int, futures: bool) -> None:
    replica = FakeReplica(depth=depth, futures=futures, max_batched_tokens=8)
    replica.turn(add(1, [3] * 60))
    for _ in range(depth):
        replica.turn()
    replica.turn(Pause(4, paused=True))
    for _ in range(depth - 1):
        assert replica.turns.idle is bool(replica.answers)
        replica.turn()
    assert replica.answers == [Answer(4)]
    assert replica.turns.idle
    assert all(not plan.rows for plan in replica.plans[-depth:])
    replica.turn(Pause(5, paused=False))
    assert replica.answers[-1] == Answer(5)
    replica.finish()
    assert replica.outputs[1] == oracle_output([3] * 60, ORDINARY, 8)


def test_a_pause_of_an_idle_replica_is_answered_at_once() -> None:
    replica = FakeReplica(depth=2, futures=True)
    assert replica.turn(Pause(4, paused=True)).answers == [Answer(4)]


def test_whoever_waits_for_a_pause_that_was_taken_back_is_answered() -> None:
    replica = FakeReplica(depth=2, futures=True)
    replica.turn(add(1, [3], sampling=ENDLESS))
    replica.turn(Pause(4, paused=True), Pause(5, paused=False))
    assert replica.answers == [Answer(4), Answer(5)]
    assert replica.plans[-1].rows


def test_a_paused_replica_takes_requests_cancels_probes_and_flushes() -> None:
    replica = FakeReplica()
    replica.turn(add(1, range(3, 13)), add(2, [9]))
    replica.turn(Pause(4, paused=True), add(3, [5, 6]))
    replica.turn(Cancel([2]), Probe(5), Flush(6))
    assert replica.answers == [Answer(4), Answer(5), Answer(6, 2)]
    assert replica.accepted == [1, 2, 3]
    assert (replica.load.running, replica.load.waiting) == (1, 1)
    replica.turn(Pause(7, paused=False))
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 13), ORDINARY, 8)
    assert replica.outputs[3] == oracle_output([5, 6], ORDINARY, 8)
    assert replica.ends == {1: 1, 3: 1}


def test_a_deadline_that_passes_in_a_pause_is_told_with_the_next_record() -> None:
    replica = FakeReplica()
    replica.turn(add(1, [3], timeout_ms=1), Pause(4, paused=True), now_us=0)
    assert replica.turns.idle
    replica.turn(Probe(5), now_us=1000)
    assert replica.failed[1].reason == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(("depth", "futures"), PACES)
@pytest.mark.parametrize("paused", [False, True])
def test_new_weights_draw_every_id_after_them(
    tmp_path: Path, depth: int, futures: bool, paused: bool
) -> None:
    replica = FakeReplica(depth=depth, futures=futures)
    weights = weights_in(tmp_path / "second")
    replica.turn(add(1, range(3, 13)), add(2, [4]))
    for _ in range(3):
        replica.turn()
    if paused:
        replica.turn(Pause(1, paused=True))
    output = replica.turn(weights)
    assert Answer(5) in output.answers
    assert any(change.cleared for change in output.changes)
    told = {number: len(ids) for number, ids in replica.outputs.items()}
    if paused:
        replica.turn(Pause(2, paused=False))
    replica.finish()
    ordinary = turned(ORDINARY, "second")
    for number, prompt in ((1, list(range(3, 13))), (2, [4])):
        old = oracle_output(prompt, ORDINARY, told[number])
        new = oracle_output([*prompt, *old], ordinary, 8 - len(old))
        assert 2 <= len(old) < 8
        assert replica.outputs[number] == [*old, *new]
    assert replica.load.free_blocks == replica.cache.total


def test_requests_stand_before_or_after_the_weights_as_in_the_record(tmp_path: Path) -> None:
    replica = FakeReplica()
    first, second = add(1, range(3, 13)), add(2, range(3, 13))
    replica.turn(first)
    output = replica.turn(Cancel([1]), weights_in(tmp_path / "second"), second)
    assert output.answers == [Answer(5)]
    replica.turn()
    assert replica.started[2].cached_tokens == 0
    replica.finish()
    expected = oracle_output(range(3, 13), turned(ORDINARY, "second"), 8)
    assert replica.outputs[2] == expected
    assert isinstance(first, Add)


@pytest.mark.parametrize(("depth", "futures"), PACES)
def test_weights_that_do_not_fit_change_nothing(tmp_path: Path, depth: int, futures: bool) -> None:
    replica = FakeReplica(depth=depth, futures=futures)
    replica.turn(add(1, range(3, 13)))
    replica.turn()
    output = replica.turn(weights_in(tmp_path / "larger", size=50))
    answer = output.answers[0]
    assert (answer.token, answer.reason) == (5, "INVALID_REQUEST")
    assert "50 ids" in answer.message
    assert replica.load.running == 1
    assert len(replica.mirror.parents) >= 2
    replica.finish()
    assert replica.outputs[1] == oracle_output(range(3, 13), ORDINARY, 8)
