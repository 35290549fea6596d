"""`radixmesh up` with a worker group that cannot be kept alive."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from radixmesh.settings import child_environment

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(90)]


async def test_a_front_that_gives_up_is_shown_with_its_reason_and_started_again(
    model_dir: Path,
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "radixmesh.cli.main", "up", "--engine=fake", f"--model={model_dir}"),
        *("--groups=1", "--port-base=0", "--fake-faults=exit@step=0"),
        env=child_environment(RADIXMESH_WORKER_MAX_FAILURES="2"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    shown: list[str] = []
    async for line in process.stderr:
        shown.append(line.decode())
        if "starts again" in shown[-1]:
            break
    process.send_signal(signal.SIGINT)
    await process.communicate()
    assert "ended with status 1; starts again" in shown[-1]
    told = [line for line in shown if "radixmesh-worker: the ranks failed 2 times in a row" in line]
    assert len(told) == 1
    assert "exited with status 17" in told[0]
    assert told[0].startswith("worker-0")
