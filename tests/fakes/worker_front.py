"""A worker group's front, in this process or in one of its own, with scripted or real ranks."""

import asyncio
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from radixmesh.rpc.frames import DEFAULT_LIMITS
from radixmesh.rpc.link import LinkLimits
from radixmesh.settings import child_environment
from worker.app import serve
from worker.front.supervisor import Launch
from worker.settings import WorkerSettings


def free_port() -> int:
    """A port that was free a moment ago, for what can't take port 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@asynccontextmanager
async def run_front(
    model_dir: Path,
    *,
    launch: Launch | None = None,
    stop: asyncio.Event | None = None,
    limits: LinkLimits = DEFAULT_LIMITS,
    **flags: Any,
) -> AsyncGenerator[str, None]:
    """Run a front until `stop` or the block's end; yields its address.

    Without `launch` its ranks are real processes.
    """
    settings = WorkerSettings(
        **{"model": str(model_dir), "engine": "fake", "port": 0, "drain_grace_s": 0, **flags}
    )
    stop = stop or asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as tasks:
        front = tasks.create_task(
            serve(settings, stop, on_listening=port.set_result, launch=launch, limits=limits)
        )
        try:
            yield f"127.0.0.1:{await port}"
        finally:
            stop.set()
            async with asyncio.timeout(10):
                await front


@asynccontextmanager
async def front_process(
    model_dir: Path, port: int, *flags: str
) -> AsyncGenerator[asyncio.subprocess.Process, None]:
    """Run `python -m worker`; killed at the block's end if it still runs."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker", "--model", str(model_dir), "--engine", "fake"),
        *("--port", str(port), *flags),
        env=child_environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
