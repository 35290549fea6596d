"""Several routers by --processes, as real processes on a real mesh of fake engines."""

import asyncio
import random
import re
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from radixmesh.client import AsyncClient, AsyncFleetClient, Result, Sampling
from radixmesh.errors import MeshError
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.up import RunningUp, gone, running_up

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]

START_S = 40.0
# Workers tell their load about once a second when nothing else makes them.
REPORT_S = 2.0


class Routers:
    """A supervisor and what it says."""

    def __init__(self, process: Process, base: int) -> None:
        self.process = process
        self.base = base
        self.lines: list[str] = []
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode().rstrip())

    async def said(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Return the first matches of a pattern in what was said."""
        async with asyncio.timeout(START_S):
            while True:
                found = [match for line in self.lines if (match := re.search(pattern, line))]
                if len(found) >= count:
                    return found
                await asyncio.sleep(0.02)

    def grpc(self, number: int) -> str:
        return f"127.0.0.1:{self.base + number}"

    def fleet(self, number: int) -> str:
        return f"127.0.0.1:{self.base + 20 + number}"

    def children(self) -> dict[str, psutil.Process]:
        """The routers by the first word of their titles."""
        found = psutil.Process(self.process.pid).children()
        return {one.cmdline()[0].split(" ")[0]: one for one in found}

    async def until_ready(self, number: int) -> None:
        """Return when a router has the whole picture of both groups."""
        async with asyncio.timeout(START_S):
            while True:
                with suppress(MeshError):
                    async with AsyncFleetClient(self.fleet(number)) as fleet:
                        views = [one.view.value for one in await fleet.list_replicas()]
                    if views == ["exact", "exact"]:
                        return
                await asyncio.sleep(0.05)

    async def load(self, number: int) -> int:
        """What a router believes to run and wait at all replicas."""
        async with AsyncFleetClient(self.fleet(number)) as fleet:
            return sum(one.running_count + one.waiting_count for one in await fleet.list_replicas())

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for the end; return the exit status."""
        async with asyncio.timeout(START_S):
            status = await self.process.wait()
            await self._reading
        return status


def free_base() -> int:
    """Return a port from which 60 are free now."""
    for base in random.sample(range(10_000, 32_000, 60), 100):
        with suppress(OSError):
            for port in range(base, base + 60):
                socket.create_server(("127.0.0.1", port)).close()
            return base
    raise AssertionError("no free ports")


@asynccontextmanager
async def routers(*flags: str, base: int = 0) -> AsyncGenerator[Routers, None]:
    ports = (f"--port={base}", f"--http-port={base and base + 40}")
    fleet = f"--fleet-port={base and base + 20}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--processes=2", "--port-step=1", *ports, fleet, *flags),
        stdout=PIPE,
        stderr=PIPE,
    )
    running = Routers(process, base)
    try:
        yield running
    finally:
        try:
            await running.end()
        except TimeoutError:
            process.kill()
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[RunningUp, None]:
    folder = tmp_path_factory.mktemp("processes")
    # With a rate, or the quicker of two that take no time at all gets everything.
    flags = ("--fake-decode-ms=20", "--fake-prefill-tokens-per-s=50000", "--max-running=64")
    async with running_up(model_dir, folder, *flags) as running:
        yield running


def before(mesh: RunningUp) -> tuple[str, ...]:
    """The flags of routers that stand before a mesh's services."""
    ports = mesh.facts["ports"]
    groups = ",".join(f"g{number}=127.0.0.1:{ports[f'worker-{number}']}" for number in (0, 1))
    return (
        f"--groups={groups}",
        f"--tokenizers=127.0.0.1:{ports['tokenizer']}",
        f"--detokenizers=127.0.0.1:{ports['detokenizer']}",
    )


def prompt_of(model_dir: Path, number: int, count: int = 96) -> list[int]:
    ordinary = ordinary_ids(model_dir)
    chance = random.Random(number)
    return [chance.choice(ordinary) for _ in range(count)]


async def ask(address: str, prompt: list[int], count: int) -> Result:
    sampling = Sampling(max_tokens=count, ignore_eos=True)
    async with AsyncClient(address) as client:
        return await client.complete(prompt, sampling=sampling, timeout_s=60)


async def until_load(many: Routers, number: int, wanted: int, timeout_s: float) -> float:
    """Return the seconds until a router believes in a load.

    Raises:
        AssertionError: It does not, in time.
    """
    began, load = time.monotonic(), -1
    while time.monotonic() - began < timeout_s:
        load = await many.load(number)
        if load == wanted:
            return time.monotonic() - began
        await asyncio.sleep(0.02)
    raise AssertionError(f"load {load}, not {wanted}")


async def test_each_has_a_title_and_ports_of_its_own_and_all_drain_on_a_signal(
    mesh: RunningUp, model_dir: Path
) -> None:
    base = free_base()
    async with routers(*before(mesh), "--settle-s=0.5", base=base) as both:
        for number in (0, 1):
            await both.until_ready(number)
        assert set(both.children()) == {"radixmesh-router-0", "radixmesh-router-1"}
        title = " ".join(psutil.Process(both.process.pid).cmdline())
        assert title.startswith("radixmesh-router processes=2")
        processes = list(both.children().values())
        prompts = [prompt_of(model_dir, number) for number in range(20)]
        streams = [
            asyncio.create_task(ask(both.grpc(number % 2), prompt, 100))
            for number, prompt in enumerate(prompts)
        ]
        await until_load(both, 0, 20, 20)
        both.process.send_signal(signal.SIGTERM)
        await both.said("draining", 2)
        # Accepted while callers may not have seen yet that it leaves.
        late = await ask(both.grpc(1), prompts[0], 2)
        assert len(late.outputs[0].token_ids) == 2
        ordinary = ordinary_ids(model_dir)
        for prompt, result in zip(prompts, await asyncio.gather(*streams), strict=True):
            assert list(result.outputs[0].token_ids) == oracle_output(prompt, ordinary, 100)
        assert await both.ended() == 0
        assert await gone(processes) == []


async def test_the_death_of_one_frees_its_work_at_once_and_disturbs_nobody_else(
    mesh: RunningUp, model_dir: Path
) -> None:
    async with routers(*before(mesh), base=free_base()) as both:
        for number in (0, 1):
            await both.until_ready(number)
        prompts = [prompt_of(model_dir, 100 + number) for number in range(16)]
        streams = [
            asyncio.create_task(ask(both.grpc(number % 2), prompt, 300))
            for number, prompt in enumerate(prompts)
        ]
        for number in (0, 1):
            # Each knows of the other's load: absolute, from the workers.
            await until_load(both, number, 16, 20)
        both.children()["radixmesh-router-0"].kill()
        freed_s = await until_load(both, 1, 8, REPORT_S)
        assert freed_s < REPORT_S
        results = await asyncio.gather(*streams, return_exceptions=True)
        ordinary = ordinary_ids(model_dir)
        for prompt, result in list(zip(prompts, results, strict=True))[1::2]:
            assert isinstance(result, Result)
            assert list(result.outputs[0].token_ids) == oracle_output(prompt, ordinary, 300)
        assert all(isinstance(result, MeshError) for result in results[::2])
        await until_load(both, 1, 0, REPORT_S)
        # It is back, at the same ports, with the whole picture.
        await both.said("router-0 \\| .*serving", 2)
        await both.until_ready(0)
        again = await ask(both.grpc(0), prompts[0], 10)
        assert list(again.outputs[0].token_ids) == oracle_output(prompts[0], ordinary, 10)


async def test_what_one_has_sent_somewhere_the_other_sends_to_the_same_place(
    mesh: RunningUp, model_dir: Path
) -> None:
    async with routers(*before(mesh), base=free_base()) as both:
        for number in (0, 1):
            await both.until_ready(number)
        prompts = [prompt_of(model_dir, 500 + number, 320) for number in range(40)]
        first = await asyncio.gather(*(ask(both.grpc(0), prompt, 1) for prompt in prompts))
        homes = [result.receipt.group_id for result in first]
        assert len(set(homes)) == 2
        second = [await ask(both.grpc(1), prompt, 1) for prompt in prompts]
        same = sum(
            result.receipt.group_id == home for result, home in zip(second, homes, strict=True)
        )
        assert same >= 0.9 * len(prompts)
        reused = sum(result.usage.cached_tokens for result in second)
        assert reused >= 0.8 * sum(map(len, prompts))


async def test_killing_the_supervisor_leaves_nothing_behind() -> None:
    async with routers("--settle-s=0") as both:
        await both.said("serving", 2)
        processes = list(both.children().values())
        assert len(processes) == 2
        both.process.kill()
        assert await gone(processes) == []


async def test_free_ports_are_told() -> None:
    async with routers("--settle-s=0") as both:
        found = await both.said(r"router-(\d) \| .*serving grpc=(\d+) http=(\d+) fleet=(\d+)", 2)
        told = [int(port) for match in found for port in match.groups()[1:]]
        assert len(set(told)) == 6
        assert await both.end(signal.SIGINT) == 0


async def test_a_port_that_stays_taken_ends_all_with_its_reason() -> None:
    base = free_base()
    with socket.create_server(("127.0.0.1", base + 1)):
        async with routers("--settle-s=0", base=base) as both:
            await both.said("router-0 .*serving")
            processes = list(both.children().values())
            assert await both.ended() == 1
            await both.said("radixmesh-router: router-1 does not stay up: .*cannot start")
            assert await gone(processes) == []
