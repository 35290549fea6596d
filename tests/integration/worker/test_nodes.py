"""A group on several hosts, here two processes on one: the same ids, and typed ends of links."""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from radixmesh import errors
from radixmesh.settings import child_environment
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.rank_processes import gone, ranks_of
from tests.fakes.router_end import DRAINING, UP, attach
from tests.fakes.worker_front import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


class Place:
    """Where the group of a test is."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.port = free_port()
        self.meeting = free_port()

    @asynccontextmanager
    async def node(
        self, rank: int, *flags: str, tp: int = 2
    ) -> AsyncGenerator[asyncio.subprocess.Process, None]:
        """Run one host of two; killed at the block's end if it still runs."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "worker", "--model", str(self.model_dir), "--engine", "fake"),
            *("--tp", str(tp), "--nnodes", "2", "--node-rank", str(rank)),
            *("--rendezvous", f"127.0.0.1:{self.meeting}", "--port", str(self.port), *flags),
            env=child_environment(),
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            _, said = await process.communicate()
            sys.stderr.write(said.decode())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@pytest.fixture
def place(model_dir: Path) -> Place:
    return Place(model_dir)


def helpers(process: asyncio.subprocess.Process) -> list[psutil.Process]:
    """Everything that a front or an agent started."""
    return psutil.Process(process.pid).children(recursive=True)


PROMPT = list(range(20, 60))


async def test_two_hosts_share_every_stage_give_the_oracle_s_ids_and_stop_together(
    place: Place,
) -> None:
    flags = ("--pp", "2", "--fake-decode-ms", "5")
    async with (
        place.node(1, *flags) as agent,
        place.node(0, *flags) as front,
        attach(place.address) as router,
    ):
        await router.until_up(0)
        assert [len(ranks_of(front.pid)), len(ranks_of(agent.pid))] == [2, 2]
        assert len(ranks_of(front.pid, "tp=0")) == len(ranks_of(agent.pid, "tp=1")) == 2
        output = router.submit(PROMPT, max_tokens=20)
        assert await output.result() == oracle_output(PROMPT, ordinary_ids(place.model_dir), 20)
        left = helpers(front) + helpers(agent)
        running = router.submit(PROMPT, max_tokens=100)
        await running.begun.wait()
        for process in (agent, front):
            process.send_signal(signal.SIGTERM)
        assert len(await running.result()) == 100
        assert [await front.wait(), await agent.wait()] == [0, 0]
        await gone(left)


async def test_a_killed_rank_of_another_host_is_named_and_replaced(place: Place) -> None:
    pace = ("--fake-decode-ms", "10")
    async with (
        place.node(0, *pace),
        place.node(1, *pace) as agent,
        attach(place.address) as router,
    ):
        await router.until_up(0)
        output = router.submit(PROMPT, max_tokens=500)
        await output.begun.wait()
        [victim] = ranks_of(agent.pid)
        victim.kill()
        async with asyncio.timeout(5):
            failure = await output.failure()
        assert isinstance(failure, errors.GroupLost)
        await router.until(lambda: router.state(0) == UP)
        again = router.submit(PROMPT, max_tokens=20)
        assert await again.result() == oracle_output(PROMPT, ordinary_ids(place.model_dir), 20)


async def test_killed_hosts_leave_no_process_and_come_back_on_the_same_ports(place: Place) -> None:
    pace = ("--fake-decode-ms", "10")
    async with place.node(1, *pace) as agent, attach(place.address) as router:
        async with place.node(0, *pace) as front:
            await router.until_up(0)
            output = router.submit(PROMPT, max_tokens=500)
            await output.begun.wait()
            left = helpers(front) + ranks_of(agent.pid)
            front.kill()
            assert isinstance(await output.failure(), errors.LinkLost)
            async with asyncio.timeout(5):
                await gone(left)
        async with place.node(0, *pace):
            await router.until_up(0)
            left = helpers(agent)
            output = router.submit(PROMPT, max_tokens=500)
            await output.begun.wait()
            agent.kill()
            async with asyncio.timeout(5):
                assert isinstance(await output.failure(), errors.GroupLost)
                await gone(left)
            async with place.node(1, *pace):
                await router.until_up(0)
                again = router.submit(PROMPT, max_tokens=5)
                assert len(await again.result()) == 5


async def test_a_host_that_was_told_something_else_is_refused_and_ends(place: Place) -> None:
    async with place.node(0), place.node(1, "--max-running", "3") as agent:
        assert agent.stderr is not None
        said = (await agent.stderr.read()).decode()
        assert await agent.wait() == 2
        assert "max_running is '64' at host 0 and '3' here" in said


async def test_a_second_host_0_names_the_flag_whose_port_is_taken(place: Place) -> None:
    with socket.create_server(("127.0.0.1", place.meeting)):
        async with place.node(0) as second:
            assert second.stderr is not None
            said = (await second.stderr.read()).decode()
            assert await second.wait() == 1
            assert f"--rendezvous 127.0.0.1:{place.meeting}: " in said


async def test_a_host_that_leaves_is_given_nothing_new_and_goes_once_nothing_runs(
    place: Place,
) -> None:
    pace = ("--fake-decode-ms", "10")
    async with place.node(0, *pace), attach(place.address) as router:
        async with place.node(1, *pace) as agent:
            await router.until_up(0)
            running = router.submit(PROMPT, max_tokens=100)
            await running.begun.wait()
            agent.send_signal(signal.SIGTERM)
            await router.until(lambda: router.state(0) == DRAINING)
            assert isinstance(await router.submit(PROMPT).failure(), errors.Draining)
            assert len(await running.result()) == 100
            async with asyncio.timeout(5):
                assert await agent.wait() == 0
        assert router.state(0) != UP
        async with place.node(1, *pace) as other:
            await router.until(lambda: router.state(0) == UP)
            again = router.submit(PROMPT, max_tokens=5)
            assert len(await again.result()) == 5
            other.send_signal(signal.SIGINT)
            async with asyncio.timeout(5):
                assert await other.wait() == 0
