"""The front as a process of its own: signals, death, restart on the same port."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from radixmesh import errors
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.rank_processes import gone, ranks_of
from tests.fakes.router_end import DRAINING, attach
from tests.fakes.worker_front import free_port, front_process

pytestmark = [pytest.mark.e2e]


async def test_all_processes_die_with_a_killed_front_and_the_same_port_serves_again(
    model_dir: Path,
) -> None:
    port = free_port()
    ordinary = ordinary_ids(model_dir)
    async with attach(f"127.0.0.1:{port}") as router:
        async with front_process(model_dir, port, "--dp", "2", "--fake-decode-ms", "10") as front:
            await router.until_up(0, 1)
            first = router.statuses[0].incarnation
            outputs = [router.submit([5 + at], max_tokens=500) for at in range(16)]
            for output in outputs:
                await output.begun.wait()
            assert len(ranks_of(front.pid)) == 2
            children = psutil.Process(front.pid).children(recursive=True)
            front.kill()
            for output in outputs:
                assert isinstance(await output.failure(), errors.LinkLost)
            async with asyncio.timeout(2):
                await gone(children)
        async with front_process(model_dir, port, "--dp", "2"):
            await router.until_up(0, 1)
            assert len(set(router.instances)) == 2
            assert router.statuses[0].incarnation != first
            prompts = [[5 + at % 900, at % 7 + 4] for at in range(500)]
            again = [router.submit(prompt, max_tokens=4) for prompt in prompts]
            for prompt, output in zip(prompts, again, strict=True):
                assert await output.result() == oracle_output(prompt, ordinary, 4)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_lets_running_requests_finish_and_exits_with_zero(
    model_dir: Path, number: signal.Signals
) -> None:
    port = free_port()
    async with (
        front_process(model_dir, port, "--fake-decode-ms", "10") as front,
        attach(f"127.0.0.1:{port}") as router,
    ):
        await router.until_up(0)
        output = router.submit([5], max_tokens=60)
        await output.begun.wait()
        ranks = ranks_of(front.pid)
        front.send_signal(number)
        await router.until(lambda: router.state(0) == DRAINING)
        refused = router.submit([6])
        assert isinstance(await refused.failure(), errors.Draining)
        assert len(await output.result()) == 60
        assert await front.wait() == 0
        await gone(ranks)


async def test_a_port_in_use_is_said_and_the_front_exits(model_dir: Path) -> None:
    port = free_port()
    async with front_process(model_dir, port), attach(f"127.0.0.1:{port}") as router:
        await router.until_up(0)
        async with front_process(model_dir, port) as second:
            assert await second.wait() == 1


async def test_a_model_that_is_not_there_is_said_and_the_front_exits(tmp_path: Path) -> None:
    async with front_process(tmp_path / "nothing", free_port()) as front:
        assert await front.wait() == 2


async def test_a_front_whose_ranks_die_again_and_again_says_why_and_exits_with_one(
    model_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--dp", "2", "--max-failures", "2", "--fake-faults", "exit@step=0")
    async with front_process(model_dir, free_port(), *flags) as front:
        assert await front.wait() == 1
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("radixmesh-worker: the ranks failed 2 times in a row: rank dp=")
    assert said.endswith("exited with status 17")
