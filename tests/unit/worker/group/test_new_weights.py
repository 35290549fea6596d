"""New weights: all ranks of a replica take them, or none does, however long one of them reads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.errors import RankDesync
from tests.fakes.oracle import oracle_output, turned
from tests.fakes.rank_threads import RankThreads
from tests.fakes.replica import ORDINARY, add
from worker.peers import PeerLost
from worker.request import Answer, Cancel, Probe, Sampling, Weights

# What a rank that waits for another one by a deadline takes for a death here.
DEADLINE_S = 0.3
SLOW = "delay@weights=900"
SHAPES = [(1, 2, False), (1, 2, True), (2, 2, False), (3, 1, False)]
PROMPT = [3, 4, 5]
SHORT = Sampling(seed=1, max_tokens=9, ignore_eos=True)
ENDLESS = Sampling(seed=1, max_tokens=120, ignore_eos=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Weights of the replicas' size."""
    added = [{"id": number} for number in range(3)]
    vocab = {f"t{number}": number for number in range(40)}
    tokenizer = {"model": {"vocab": vocab}, "added_tokens": added}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 40}))
    return tmp_path


@pytest.fixture
def started() -> Iterator[list[RankThreads]]:
    replicas: list[RankThreads] = []
    yield replicas
    for replica in replicas:
        replica.close()


def answer(replica: RankThreads, token: int) -> Answer:
    """Read outputs until the ranks answer a control."""
    for output in replica.front.outputs():
        for one in output.answers:
            if one.token == token:
                return one
    raise AssertionError(f"the ranks ended: {replica.ends}")


def ids_of(replica: RankThreads, number: int) -> list[int]:
    """Read outputs until a request has ended."""
    ids: list[int] = []
    for output in replica.front.outputs():
        at = iter(unpack_ids(output.token_ids))
        columns = zip(output.request_ids, output.counts, output.finishes, strict=True)
        for request_id, count, finish in columns:
            drawn = [next(at) for _ in range(count)]
            ids += drawn if request_id == number else []
            if request_id == number and finish:
                return ids
    raise AssertionError(f"the ranks ended: {replica.ends}")


def outcome(replica: RankThreads, folder: Path) -> Answer:
    """Tell the ranks to change their weights, in the midst of a request that goes on."""
    replica.front.send(add(1, PROMPT, sampling=ENDLESS))
    replica.front.send(Weights(7, str(folder), "2"))
    return answer(replica, 7)


def assert_all_ended_alike(replica: RankThreads) -> None:
    # At rest first: a rank whose rank (0, 0) goes in the midst of a step does not end that.
    replica.front.send(Cancel([1]), Probe(99))
    answer(replica, 99)
    replica.close()
    assert len({turns.digest for turns in replica.turns}) == 1
    assert all(turns.idle for turns in replica.turns)


@pytest.mark.parametrize(("pp", "tp", "overlap"), SHAPES)
def test_a_rank_that_reads_longer_than_a_peer_may_take_breaks_nothing(
    started: list[RankThreads], folder: Path, pp: int, tp: int, overlap: bool
) -> None:
    slow = f"{SLOW}:pp={pp - 1}:tp={tp - 1}"
    replica = RankThreads(pp=pp, tp=tp, faults=[slow], deadline_s=DEADLINE_S, overlap=overlap)
    started.append(replica)
    assert outcome(replica, folder) == Answer(7)
    replica.front.send(add(2, PROMPT, sampling=SHORT))
    assert ids_of(replica, 2) == oracle_output(PROMPT, turned(ORDINARY, folder.name), 9)
    assert_all_ended_alike(replica)


def test_rank_0_may_be_the_slow_one(started: list[RankThreads], folder: Path) -> None:
    replica = RankThreads(pp=2, tp=2, faults=[f"{SLOW}:pp=0:tp=0"], deadline_s=DEADLINE_S)
    started.append(replica)
    assert outcome(replica, folder) == Answer(7)
    replica.front.send(Probe(8))
    assert answer(replica, 8) == Answer(8)


@pytest.mark.parametrize("where", ["pp=0:tp=0", "pp=0:tp=1", "pp=1:tp=0", "pp=1:tp=1"])
def test_one_rank_that_cannot_read_makes_all_refuse_and_changes_nothing(
    started: list[RankThreads], folder: Path, where: str
) -> None:
    replica = RankThreads(pp=2, tp=2, faults=[f"refuse@weights=1:{where}"])
    started.append(replica)
    refusal = outcome(replica, folder)
    assert refusal.reason == "INVALID_REQUEST"
    assert "can't be read" in refusal.message
    number = ["pp=0:tp=0", "pp=0:tp=1", "pp=1:tp=0", "pp=1:tp=1"].index(where)
    assert refusal.message.startswith(f"rank {number}: ") == (number > 0)
    replica.front.send(add(2, PROMPT, sampling=SHORT))
    assert ids_of(replica, 2) == oracle_output(PROMPT, ORDINARY, 9)
    replica.front.send(Weights(9, str(folder), "2"))
    assert answer(replica, 9) == Answer(9), "a later try is its own"
    assert_all_ended_alike(replica)


def test_several_changes_in_one_step_take_effect_in_their_order(
    started: list[RankThreads], folder: Path
) -> None:
    replica = RankThreads(pp=2, tp=2, faults=["refuse@weights=2:pp=1:tp=1"])
    started.append(replica)
    # One write, so that the leader takes all at once.
    replica.front.send(
        Weights(7, str(folder), "2"),
        Weights(8, str(folder), "3"),
        Weights(9, str(folder / "none"), "4"),
        add(2, PROMPT, sampling=SHORT),
    )
    assert answer(replica, 7) == Answer(7)
    assert ids_of(replica, 2) == oracle_output(PROMPT, turned(ORDINARY, folder.name), 9)


@pytest.mark.parametrize("where", ["tp=1", "pp=1:tp=0"])
def test_a_rank_that_was_told_nothing_of_new_weights_is_found_before_the_others_wait_for_it(
    started: list[RankThreads], folder: Path, where: str
) -> None:
    replica = RankThreads(pp=2, tp=2, faults=[f"skip@step=0:{where}"], deadline_s=DEADLINE_S)
    started.append(replica)
    replica.front.send(Weights(7, str(folder), "2"))
    assert not list(replica.front.outputs())
    replica.join()
    assert isinstance(replica.ends[0], PeerLost)


@pytest.mark.parametrize("where", ["tp=1", "pp=1:tp=0"])
def test_a_rank_that_differs_already_is_told_apart_from_one_that_answers(
    started: list[RankThreads], folder: Path, where: str
) -> None:
    replica = RankThreads(pp=2, tp=2, faults=[f"desync@step=0:{where}"])
    started.append(replica)
    replica.front.send(add(1, PROMPT, sampling=ENDLESS), Weights(7, str(folder), "2"))
    # Where the request comes first, its first ids differ when the weights come.
    replica.front.send(Weights(8, str(folder), "2"))
    list(replica.front.outputs())
    replica.join()
    assert isinstance(replica.ends[0], RankDesync)
    assert all(isinstance(end, RankDesync | PeerLost) for end in replica.ends.values())
