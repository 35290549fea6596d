"""Both services as processes: a clear refusal, a start on a free port, a clean exit on SIGTERM."""

import asyncio
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import psutil
import pytest

from tests.fakes.text_router import detokenizer_router, tokenizer_router

ROOT = Path(__file__).parents[2]

roles = pytest.mark.parametrize("role", ["tokenizer", "detokenizer"])


async def start(role: str, *flags: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenizer_svc", role, *flags, cwd=ROOT, stderr=PIPE
    )


async def port_of(process: Process) -> int:
    """Read the log until the service says where it listens."""
    assert process.stderr is not None
    async for line in process.stderr:
        found = re.search(rb"listening .*port=(\d+)", line)
        if found:
            return int(found[1])
    raise AssertionError("the service ended before it listened")


@pytest.mark.e2e
@pytest.mark.timeout(60)
@roles
async def test_a_process_serves_until_sigterm_and_exits_with_0(role: str, model_dir: Path) -> None:
    process = await start(role, "--model", str(model_dir), "--port", "0")
    try:
        async with asyncio.timeout(50):
            port = await port_of(process)
            attached = tokenizer_router if role == "tokenizer" else detokenizer_router
            async with attached(port) as router:
                assert router.frames[0].info.model == model_dir.name
                title = psutil.Process(process.pid).cmdline()[0]
                assert title == f"radixmesh-{role} {model_dir.name}"
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.e2e
@pytest.mark.timeout(60)
@roles
async def test_a_model_that_is_not_there_is_named(role: str, tmp_path: Path) -> None:
    process = await start(role, "--model", str(tmp_path / "nowhere"))
    _, said = await process.communicate()
    assert process.returncode == 2
    assert said.startswith(f"radixmesh-{role}: --model: no model at".encode())
