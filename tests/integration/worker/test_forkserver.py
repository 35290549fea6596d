"""The fork server: what it starts, what it keeps, and who dies with whom."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import msgspec
import psutil
import pytest

from radixmesh.settings import child_environment
from tests.fakes.rank_processes import gone, ranks_of
from tests.fakes.rank_threads import FrontEnd
from worker.config import RankConfig
from worker.group.launch import LOST
from worker.node.forks import ForkServer
from worker.node.launcher import RankLauncher, RankSet
from worker.request import Ready

pytestmark = [pytest.mark.e2e]


@pytest.fixture
async def launcher(model_dir: Path) -> AsyncIterator[RankLauncher]:
    launcher = RankLauncher(RankConfig(model_dir=str(model_dir), engine="fake", tp=3))
    yield launcher
    await launcher.aclose()


async def start(launcher: RankLauncher, incarnation: int = 1) -> RankSet:
    """Start ranks and wait until all are ready."""
    ranks = await launcher(0, incarnation)
    front = FrontEnd(ranks.mailbox)
    assert isinstance(await asyncio.to_thread(front.receive), Ready)
    return ranks


async def end(ranks: RankSet, grace_s: float = 5) -> None:
    ranks.mailbox.close()
    await ranks.end(grace_s)


def server() -> psutil.Process:
    [found] = psutil.Process().children()
    return found


async def test_one_server_starts_all_ranks_and_keeps_none_of_their_descriptors(
    launcher: RankLauncher,
) -> None:
    first = await start(launcher, 1)
    before = server().num_fds()
    second = await start(launcher, 2)
    assert [each.ppid() for each in ranks_of(os.getpid())] == [server().pid] * 6
    assert server().num_fds() == before
    assert server().num_threads() == 1
    await end(first)
    await end(second)
    assert ranks_of(os.getpid()) == []
    assert server().num_fds() == before


async def test_ranks_lead_sessions_and_read_nothing(launcher: RankLauncher) -> None:
    ranks = await start(launcher)
    processes = ranks_of(os.getpid())
    assert len(processes) == 3
    for pid in (process.pid for process in processes):
        assert os.getsid(pid) == pid
        assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull  # noqa: PTH115
    await end(ranks)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_killed_rank_is_told_at_once_and_by_name(
    launcher: RankLauncher, number: signal.Signals
) -> None:
    ranks = await start(launcher)
    [victim] = ranks_of(os.getpid(), "tp=1")
    victim.send_signal(number)
    async with asyncio.timeout(1):
        assert await ranks.first_end() == f"rank dp=0 pp=0 tp=1 was killed by {number.name}"
    await end(ranks)


async def test_ranks_die_with_their_server_and_the_next_start_has_another(
    launcher: RankLauncher,
) -> None:
    ranks = await start(launcher)
    processes = ranks_of(os.getpid())
    old = server().pid
    os.kill(old, signal.SIGKILL)
    assert "was lost with its fork server" in await ranks.first_end()
    async with asyncio.timeout(2):
        await gone(processes)
    await end(ranks)
    again = await start(launcher)
    assert len(ranks_of(os.getpid())) == 3
    assert server().pid != old
    await end(again)


async def test_a_stuck_server_is_killed_with_its_ranks(
    launcher: RankLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.node.forks.ANSWER_S", 0.2)
    ranks = await start(launcher)
    processes = ranks_of(os.getpid())
    os.kill(server().pid, signal.SIGSTOP)
    await end(ranks, 0)
    async with asyncio.timeout(2):
        await gone(processes)


async def test_a_server_that_is_stuck_when_it_is_to_start_ranks_is_replaced(
    launcher: RankLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.node.forks.ANSWER_S", 0.2)
    first = await start(launcher)
    old = server()
    old.suspend()
    async with asyncio.timeout(5):
        with pytest.raises(ConnectionError, match="was lost with its fork server"):
            await launcher(1, 2)
    await gone([old])
    await end(first)
    again = await start(launcher, 3)
    assert server().pid != old.pid
    await end(again)


async def test_a_server_that_is_stuck_before_its_first_answer_is_replaced(model_dir: Path) -> None:
    base = RankConfig(model_dir=str(model_dir), engine="fake", tp=2)
    async with aclosing(RankLauncher(base, startup_s=4)) as launcher:
        starting = asyncio.create_task(launcher(0, 1))
        while not (begun := psutil.Process().children()):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
        [old] = begun
        old.suspend()
        async with asyncio.timeout(10):
            with pytest.raises(ConnectionError, match="was lost with its fork server"):
                await starting
        await gone([old])
        ranks = await start(launcher, 2)
        assert server().pid != old.pid
        await end(ranks)


async def test_orders_that_a_server_never_got_leave_no_descriptor(model_dir: Path) -> None:
    with socket.socket() as mailbox:
        before = psutil.Process().num_fds()
        base = RankConfig(model_dir=str(model_dir), engine="fake")
        forks = await ForkServer.start(base)
        rank = forks.fork(msgspec.structs.replace(base, mailbox_fd=mailbox.fileno()))
        await forks.close()
        assert rank.ended.result() == LOST
        assert psutil.Process().num_fds() == before


def test_the_torch_engine_is_imported_on_one_thread() -> None:
    script = (
        "import sys, os; from worker.config import RankConfig; "
        "from worker.engine.preload import preload; "
        "preload(RankConfig(model_dir='/', carrier='gloo')); "
        "assert 'torch' in sys.modules; "
        "print(len(os.listdir('/proc/self/task')))"
    )
    environment = child_environment(OPENBLAS_NUM_THREADS="1")
    told = subprocess.check_output([sys.executable, "-c", script], env=environment)
    assert told == b"1\n"
