"""`radixmesh up` as a real process, for end-to-end tests: started, asked, killed, ended."""

import asyncio
import json
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from radixmesh.client import AsyncFleetClient, Phase

START_S = 60.0


@dataclass(frozen=True)
class RunningUp:
    """A mesh that said it serves."""

    process: Process
    ready_file: Path

    @property
    def facts(self) -> Any:
        """What the ready file says now."""
        return json.loads(self.ready_file.read_text())

    @property
    def grpc(self) -> str:
        return str(self.facts["grpc"])

    @property
    def http(self) -> str:
        return str(self.facts["http"])

    def tree(self) -> list[psutil.Process]:
        """Every process of the mesh, `up` itself first."""
        up = psutil.Process(self.process.pid)
        return [up, *up.children(recursive=True)]

    def ranks(self, group: int) -> list[psutil.Process]:
        front = psutil.Process(self.facts["pids"][f"worker-{group}"])
        found = front.children(recursive=True)
        return [each for each in found if "radixmesh-worker rank" in " ".join(each.cmdline())]

    async def until_whole(self) -> None:
        """Wait until every replica takes requests again."""
        async with asyncio.timeout(START_S), AsyncFleetClient(self.facts["fleet"]) as fleet:
            async for replicas in fleet.watch_fleet(min_interval_s=0.05):
                if len(replicas) == 2 and all(each.phase is Phase.READY for each in replicas):
                    return

    async def end(self, number: signal.Signals = signal.SIGINT) -> int:
        """Send a signal and wait for the end; return the exit status."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        async with asyncio.timeout(START_S):
            return await self.process.wait()


@asynccontextmanager
async def running_up(
    model: Path | str, folder: Path, *flags: str, engine: str = "fake", groups: int = 2
) -> AsyncGenerator[RunningUp, None]:
    """Run a mesh on free ports; ended at the latest on the way out."""
    ready_file = folder / "ready.json"
    log = folder / "up.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "radixmesh.cli.main", "up", f"--engine={engine}", f"--model={model}"),
            *(f"--groups={groups}", "--port-base=0", f"--ready-file={ready_file}", *flags),
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
        )
    running = RunningUp(process, ready_file)
    try:
        assert process.stdout is not None
        async with asyncio.timeout(START_S):
            table = await process.stdout.readuntil(b"OpenAI API")
        assert table, log.read_text()
        yield running
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        raise AssertionError(f"up did not start:\n{log.read_text()[-5000:]}") from error
    finally:
        try:
            await running.end()
        except TimeoutError:
            process.kill()
            await process.wait()


async def gone(processes: list[psutil.Process], timeout_s: float = 10.0) -> list[psutil.Process]:
    """Wait for processes to end; return those that did not."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, timeout=timeout_s)
    return [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
