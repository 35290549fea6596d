"""The router as a process: it starts alone, says that it is not ready, and leaves when told."""

import asyncio
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import psutil
import pytest

pytestmark = pytest.mark.e2e


@asynccontextmanager
async def router(*flags: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *flags, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """Return the first match of a pattern in what the process logs."""
    assert process.stderr is not None
    async with asyncio.timeout(15):
        async for line in process.stderr:
            found = re.search(pattern, line.decode())
            if found:
                return found
    raise AssertionError(f"the process never said {pattern}")


FREE = ("--port=0", "--http-port=0", "--fleet-port=0", "--settle-s=0")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_status_0(number: signal.Signals) -> None:
    async with router(*FREE, "--groups=127.0.0.1:1") as process:
        await said(process, "router.app not ready")
        title = " ".join(psutil.Process(process.pid).cmdline())
        assert title.startswith("radixmesh-router groups=1")
        process.send_signal(number)
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def test_without_services_it_is_ready_and_says_when_to_come_again() -> None:
    async with router(*FREE, "--ready-wait-s=0") as process:
        port = int((await said(process, r"serving .*http=(\d+)"))[1])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/readiness")).status_code == 200
            answer = await http.post("/v1/completions", json={"model": "any", "prompt": "hi"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_replica_ready"
            assert int(answer.headers["retry-after"]) >= 1
            assert (await http.get("/v1/models")).json()["data"] == []


async def test_it_is_not_ready_while_one_that_is_listed_may_still_answer() -> None:
    async with router(*FREE, "--groups=127.0.0.1:1") as process:
        port = int((await said(process, r"serving .*http=(\d+)"))[1])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            assert (await http.get("/liveness")).status_code == 200
            assert (await http.get("/readiness")).status_code == 503


async def test_a_port_in_use_ends_it_with_a_message() -> None:
    async with router(*FREE) as first:
        port = (await said(first, r"serving grpc=(\d+)"))[1]
        async with router(*FREE, f"--port={port}") as second:
            await said(second, "cannot start")
            assert await second.wait() == 1
