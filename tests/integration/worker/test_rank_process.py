"""Real rank processes, forked by a fork server, over inherited sockets."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from radixmesh.blocks import Namespace, pack_ids, unpack_ids
from tests.fakes.forks import ForkedRanks, Forks
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.rank_threads import FrontEnd
from worker.config import FakeConfig, RankConfig
from worker.group.topology import Topology
from worker.request import Add, Broken, Ready, Sampling

pytestmark = pytest.mark.e2e


Start = Callable[..., ForkedRanks]


@pytest.fixture(scope="module")
def forks(model_dir: Path) -> Iterator[Forks]:
    forks = Forks(RankConfig(model_dir=str(model_dir), engine="fake"))
    yield forks
    forks.close()


@pytest.fixture
def start(forks: Forks, model_dir: Path) -> Iterator[Start]:
    running: list[ForkedRanks] = []

    def starter(*faults: str, last_faults: tuple[str, ...] = (), **values: int) -> ForkedRanks:
        config = msgspec.structs.replace(
            RankConfig(model_dir=str(model_dir), engine="fake", fake=FakeConfig(faults=faults)),
            **values,
        )
        running.append(ForkedRanks(forks, config, last_faults))
        return running[-1]

    yield starter
    for ranks in running:
        ranks.close()


def ask(front: FrontEnd, prompt: list[int], count: int) -> list[int]:
    namespace = Namespace(model="tiny").encode()
    sampling = Sampling(seed=1, max_tokens=count, ignore_eos=True)
    front.send(Add(1, pack_ids(prompt), b"", sampling, namespace))
    ids: list[int] = []
    for output in front.outputs():
        ids += unpack_ids(output.token_ids)
        if any(output.finishes):
            break
    return ids


@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 2)])
def test_rank_processes_serve_a_request_and_end_with_their_front(
    start: Start, model_dir: Path, pp: int, tp: int
) -> None:
    ranks = start(pp=pp, tp=tp)
    ready = ranks.front.receive()
    assert isinstance(ready, Ready)
    assert ready.kv_blocks == 4096
    prompt = list(range(20, 60))
    expected = oracle_output(prompt, ordinary_ids(model_dir), 20)
    assert ask(ranks.front, prompt, 20) == expected
    titles = [psutil.Process(process.pid).cmdline()[0] for process in ranks.processes]
    assert titles == [
        f"radixmesh-worker rank {place}" for place in Topology(pp=pp, tp=tp).replica(0)
    ]
    assert ranks.close() == [0] * (pp * tp)


def test_a_killed_rank_0_is_the_end_of_its_socket_and_of_its_peers(start: Start) -> None:
    ranks = start(tp=2)
    assert isinstance(ranks.front.receive(), Ready)
    ranks.processes[0].kill()
    assert ranks.front.receive() is None
    assert [process.wait() for process in ranks.processes] == [-signal.SIGKILL, 0]


def test_a_killed_follower_is_told_as_a_lost_group_at_the_next_step(start: Start) -> None:
    ranks = start(tp=2)
    assert isinstance(ranks.front.receive(), Ready)
    ranks.processes[1].kill()
    ranks.processes[1].wait()
    assert ask(ranks.front, [20, 21], 4) == []
    assert ranks.processes[0].wait() == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("desync@step=2:tp=1", "RANK_DESYNC"),
        ("exit@step=2:tp=1", "GROUP_LOST"),
        ("hang@step=2:tp=1", "GROUP_LOST"),
        ("raise@step=2:tp=0", "INTERNAL"),
    ],
)
def test_what_breaks_a_rank_is_the_last_that_the_front_hears(
    start: Start, fault: str, reason: str
) -> None:
    ranks = start(fault, tp=2, peer_timeout_s=1)
    assert isinstance(ranks.front.receive(), Ready)
    namespace = Namespace(model="tiny").encode()
    sampling = Sampling(seed=1, max_tokens=50, ignore_eos=True)
    ranks.front.send(Add(1, pack_ids([20]), b"", sampling, namespace))
    assert ranks.front.last_word().reason == reason
    assert ranks.front.receive() is None
    # Who leaves because of another rank is not to blame.
    assert ranks.processes[0].wait() == (0 if reason == "GROUP_LOST" else 1)
    ranks.processes[1].kill()


def test_a_model_that_cannot_be_loaded_is_told_before_the_end(start: Start) -> None:
    ranks = start("explode@step=1")
    message = ranks.front.receive()
    assert isinstance(message, Broken)
    assert message.reason == "INVALID_REQUEST"
    assert "--fake-faults" in message.message
    assert ranks.close() == [1]


def test_what_another_rank_refuses_at_its_start_is_told_before_it_ends(start: Start) -> None:
    ranks = start(tp=2, last_faults=("explode@step=1",))
    message = ranks.front.receive()
    assert isinstance(message, Broken)
    assert message.reason == "INVALID_REQUEST"
    assert "--fake-faults" in message.message
    assert ranks.close() == [1, 1]


def test_a_stuck_step_ends_the_process(start: Start) -> None:
    ranks = start("hang@step=0", step_timeout_s=1)
    assert isinstance(ranks.front.receive(), Ready)
    assert ask(ranks.front, [20], 4) == []
    assert ranks.processes[0].wait() == 70


def test_a_stuck_step_ends_a_rank_that_others_wait_for(start: Start) -> None:
    ranks = start("hang@step=2:tp=1", tp=2, step_timeout_s=1, peer_timeout_s=9)
    assert isinstance(ranks.front.receive(), Ready)
    assert len(ask(ranks.front, [20], 9)) < 9
    first, stuck = (process.wait() for process in ranks.processes)
    assert stuck == 70
    # The one that waits has waited as long: it finds the other one's end (0: it leaves because of
    # another one, 1: it broke), or its own limit.
    assert first in (0, 1, 70)


def test_a_poisoned_request_ends_the_process_without_a_word(start: Start) -> None:
    ranks = start("exit@prompt-contains=77")
    assert isinstance(ranks.front.receive(), Ready)
    assert len(ask(ranks.front, [20, 21], 4)) == 4
    assert ask(ranks.front, [20, 77, 21], 4) == []
    assert ranks.processes[0].wait() == 17


def test_a_fake_rank_loads_no_torch() -> None:
    script = (
        "import sys, worker.group.forkserver, worker.engine.fake; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script]) == b"False\n"


def test_an_idle_rank_uses_no_cpu(start: Start) -> None:
    ranks = start(tp=2)
    assert isinstance(ranks.front.receive(), Ready)
    ask(ranks.front, [20, 21], 4)
    processes = [psutil.Process(process.pid) for process in ranks.processes]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    with pytest.raises(psutil.TimeoutExpired):
        processes[0].wait(1)  # the passing of time is what is measured here
    after = [sum(process.cpu_times()[:2]) for process in processes]
    assert sum(after) - sum(before) <= 0.02
