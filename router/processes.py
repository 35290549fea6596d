"""Several router processes on one host: started, started again, drained and ended together.

Each is a router of its own, with its own ports, links and index; they share nothing.
Knows command lines and signals; no request, and no gRPC: it forks.
"""

import asyncio
import sys
from collections.abc import Sequence

from radixmesh.cli.processes import Backoff, Child, Say, ServiceFailed
from router.settings import RouterSettings

# A process whose first lives are all short is given up after so many.
TRIES = 3
# What a router needs beside its grace: for its last words, and to leave.
ENDS_S = 3.0


def command(flags: Sequence[str], settings: RouterSettings, number: int) -> tuple[str, ...]:
    """Return the command line of one process; the last of equal flags counts."""
    ports = settings.ports_of(number)
    return (
        *(sys.executable, "-m", "router", *flags, "--processes=1", f"--process-number={number}"),
        *(f"--{name.replace('_', '-')}={port}" for name, port in ports.items()),
    )


async def supervise(
    flags: Sequence[str], settings: RouterSettings, stop: asyncio.Event, *, say: Say
) -> None:
    """Keep the processes running until `stop` is set, and all of them have drained.

    Args:
        flags: The command line, as it was given.
        settings: The same, read.
        stop: Set it to drain and leave.
        say: Takes the name of a process and a line of its log.

    Raises:
        ServiceFailed: One can't start, again and again; all have ended.
    """
    children = [_child(flags, settings, number, say) for number in range(settings.processes)]
    failures: list[ServiceFailed] = []
    failed = asyncio.Event()

    async def keep(child: Child) -> None:
        try:
            await child.run()
        except ServiceFailed as failure:
            failures.append(failure)
            failed.set()

    async with asyncio.TaskGroup() as tasks:
        for child in children:
            tasks.create_task(keep(child))
        await _first(stop, failed)
        await asyncio.gather(*(child.stop() for child in children))
    if failures:
        raise failures[0]


def _child(flags: Sequence[str], settings: RouterSettings, number: int, say: Say) -> Child:
    return Child(
        f"router-{number}",
        command(flags, settings, number),
        say=say,
        grace_s=settings.settle_s + settings.drain_grace_s + ENDS_S,
        backoff=Backoff(tries=TRIES),
    )


async def _first(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def to_stderr(name: str, line: str) -> None:
    """Show a line of a process with its name in front; JSON has the name in a field."""
    head = "" if line.startswith("{") else f"{name} | "
    sys.stderr.write(f"{head}{line}\n")
    sys.stderr.flush()
