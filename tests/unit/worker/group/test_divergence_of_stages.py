"""Stages that wait for each other's results and were not told the same: a typed end, no waiting."""

import logging
import time
from collections.abc import Iterator

import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.errors import RankDesync
from tests.fakes.oracle import oracle_output
from tests.fakes.rank_threads import RankThreads
from tests.fakes.replica import ORDINARY, add
from worker.group.carrier import PeerLost
from worker.request import Sampling

ENDLESS = Sampling(seed=1, max_tokens=100, ignore_eos=True)
FEW = Sampling(seed=1, max_tokens=12, ignore_eos=True)


@pytest.fixture
def started() -> Iterator[list[RankThreads]]:
    replicas: list[RankThreads] = []
    yield replicas
    for replica in replicas:
        replica.close()


def ends_within(seconds: float, replica: RankThreads, requests: int) -> BaseException:
    """Submit so many requests at once; return what rank (0, 0) ended with."""
    adds = [add(number, [3, 4, 5 + number], sampling=ENDLESS) for number in range(1, requests + 1)]
    began = time.monotonic()
    replica.front.send(*adds)
    list(replica.front.outputs())
    assert time.monotonic() - began < seconds
    return replica.ends[0]


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_that_wait_for_each_other_give_the_oracle_s_ids(
    started: list[RankThreads], pp: int
) -> None:
    replica = RankThreads(pp=pp, staged=True)
    started.append(replica)
    replica.front.send(*(add(number, [3 + number], sampling=FEW) for number in range(1, 9)))
    ids: dict[int, list[int]] = {number: [] for number in range(1, 9)}
    for output in replica.front.outputs():
        at = iter(unpack_ids(output.token_ids))
        for number, count in zip(output.request_ids, output.counts, strict=True):
            ids[number] += [next(at) for _ in range(count)]
        if all(len(each) == 12 for each in ids.values()):
            break
    assert ids == {n: oracle_output([3 + n], ORDINARY, 12) for n in ids}


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("kind", ["drop", "alter", "reorder"])
@pytest.mark.parametrize(("pp", "stage"), [(2, 1), (4, 1), (4, 3)])
def test_a_stage_that_was_told_another_request_is_found_before_its_result_is_waited_for(
    started: list[RankThreads], pp: int, stage: int, kind: str, requests: int
) -> None:
    replica = RankThreads(pp=pp, staged=True, faults=[f"{kind}@request=1:pp={stage}"])
    started.append(replica)
    assert isinstance(ends_within(5, replica, requests), RankDesync)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(("pp", "stage"), [(2, 1), (4, 1), (4, 3)])
def test_a_stage_that_misses_a_step_is_lost_after_a_peer_s_time(
    started: list[RankThreads], pp: int, stage: int, requests: int
) -> None:
    fault = f"skip@step=3:pp={stage}"
    replica = RankThreads(pp=pp, staged=True, faults=[fault], deadline_s=0.3)
    started.append(replica)
    assert isinstance(ends_within(5, replica, requests), RankDesync | PeerLost)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(("pp", "stage"), [(2, 1), (4, 1), (4, 3)])
def test_a_stage_that_stands_still_is_lost_after_a_peer_s_time_and_not_a_step_s(
    started: list[RankThreads], pp: int, stage: int, requests: int
) -> None:
    faults = [f"skip@step={step}:pp={stage}" for step in range(3, 40)]
    replica = RankThreads(pp=pp, staged=True, faults=faults, deadline_s=0.3)
    started.append(replica)
    assert isinstance(ends_within(5, replica, requests), PeerLost)


def test_the_plans_of_a_rank_that_lost_another_are_in_the_log(
    started: list[RankThreads], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    replica = RankThreads(tp=2, faults=["skip@step=3:tp=1"], deadline_s=0.3)
    started.append(replica)
    assert isinstance(ends_within(5, replica, 1), PeerLost)
    replica.join()
    told = [vars(record)["plans"] for record in caplog.records if record.msg == "planned last"]
    ours, theirs = sorted(
        ([plan.split()[0] for plan in plans.split("; ")] for plans in told), reverse=True
    )
    assert (ours[-2:], theirs[-1]) == (["2", "3"], "2")
