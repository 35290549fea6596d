"""Rank processes that talk by gloo: the same ids as by sockets, and the same typed ends."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from radixmesh.blocks import Namespace, pack_ids, unpack_ids
from tests.fakes.forks import ForkedRanks, Forks
from tests.fakes.oracle import oracle_output, ordinary_ids
from worker.config import FakeConfig, RankConfig
from worker.request import Add, Ready, Sampling

pytestmark = [pytest.mark.e2e]


@pytest.fixture(scope="module")
def forks(model_dir: Path) -> Iterator[Forks]:
    config = RankConfig(model_dir=str(model_dir), engine="fake", carrier="gloo")
    forks = Forks(config)
    yield forks
    forks.close()


@contextmanager
def launch(forks: Forks, model_dir: Path, *faults: str, **values: Any) -> Iterator[ForkedRanks]:
    """Ranks that are ready."""
    fake = FakeConfig(faults=faults)
    config = RankConfig(model_dir=str(model_dir), engine="fake", carrier="gloo", fake=fake)
    ranks = ForkedRanks(forks, msgspec.structs.replace(config, **values))
    try:
        assert isinstance(ranks.front.receive(), Ready)
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
        ranks.close()


@pytest.fixture(params=[(1, 3), (3, 1)], ids=["tp=3", "pp=3"])
def ranks(request: pytest.FixtureRequest, forks: Forks, model_dir: Path) -> Iterator[ForkedRanks]:
    pp, tp = request.param
    with launch(forks, model_dir, pp=pp, tp=tp, max_batched_tokens=4096) as ranks:
        yield ranks


def submit(ranks: ForkedRanks, number: int, prompt: list[int], count: int) -> None:
    namespace = Namespace(model="tiny").encode()
    sampling = Sampling(seed=1, max_tokens=count, ignore_eos=True)
    ranks.front.send(Add(number, pack_ids(prompt), b"", sampling, namespace))


def finished(ranks: ForkedRanks, count: int) -> dict[int, list[int]]:
    """Ids of all requests once so many have ended."""
    ids: dict[int, list[int]] = {}
    for output in ranks.front.outputs():
        at = iter(unpack_ids(output.token_ids))
        columns = zip(output.request_ids, output.counts, output.finishes, strict=True)
        for number, length, finish in columns:
            ids.setdefault(number, []).extend(next(at) for _ in range(length))
            count -= bool(finish)
        if not count:
            break
    return ids


def test_small_and_large_records_carry_the_same_requests_to_all(
    ranks: ForkedRanks, model_dir: Path
) -> None:
    ordinary = ordinary_ids(model_dir)
    # 1000 ids take a record just below one message, 1100 and 3900 more than one.
    prompts = {
        number: [20 + (number + at) % 900 for at in range(length)]
        for number, length in enumerate((1, 1000, 1100, 3900, 30), 1)
    }
    for number, prompt in prompts.items():
        submit(ranks, number, prompt, 12)
    assert finished(ranks, len(prompts)) == {
        number: oracle_output(prompt, ordinary, 12) for number, prompt in prompts.items()
    }


def test_idle_ranks_use_no_cpu(ranks: ForkedRanks) -> None:
    processes = [psutil.Process(process.pid) for process in ranks.processes]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    with pytest.raises(psutil.TimeoutExpired):
        processes[0].wait(1)  # the passing of time is what is measured here
    after = [sum(process.cpu_times()[:2]) for process in processes]
    assert sum(after) - sum(before) <= 0.03


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("desync@step=2:tp=1", "RANK_DESYNC"), ("exit@step=2:tp=1", "GROUP_LOST")],
)
def test_what_breaks_a_rank_is_told(forks: Forks, model_dir: Path, fault: str, reason: str) -> None:
    with launch(forks, model_dir, fault, tp=2) as ranks:
        submit(ranks, 1, [20], 50)
        assert ranks.front.last_word().reason == reason


def test_a_stage_that_was_told_another_request_is_found_out(forks: Forks, model_dir: Path) -> None:
    with launch(forks, model_dir, "alter@request=3:pp=1", pp=2) as ranks:
        for number in range(1, 6):
            submit(ranks, number, [20, 20 + number], 50)
        assert ranks.front.last_word().reason == "RANK_DESYNC"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_that_answers_no_more_is_lost_in_time(
    forks: Forks, model_dir: Path, number: signal.Signals
) -> None:
    with launch(forks, model_dir, tp=2, peer_timeout_s=0.5) as ranks:
        os.kill(ranks.processes[1].pid, number)
        began = time.monotonic()
        submit(ranks, 1, [20], 5)
        assert ranks.front.last_word().reason == "GROUP_LOST"
        assert time.monotonic() - began < 3
