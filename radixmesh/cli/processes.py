"""A process that is kept running: started, watched, restarted with back-off, ended for good.

Knows signals and pipes; not what the process does. A process leads its own group, so
that Ctrl-C in a terminal reaches it only through us, and dies with us whatever kills us.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Final

from radixmesh.settings import child_environment

__all__ = ["Backoff", "Child", "Say", "ServiceFailed"]

Say = Callable[[str, str], None]

_PR_SET_PDEATHSIG: Final = 1
_MAX_LINE: Final = 16 * 1024
_USAGE_STATUS: Final = 2
# Loaded here: nothing but one call may happen between fork and exec.
_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None


class ServiceFailed(Exception):
    """A process cannot work, and starting it again would change nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses before restarts: they double, and begin anew after a life of `steady_s`.

    A process is given up when none of its first `tries` lives was steady; None: never.
    """

    first_s: float = 0.2
    longest_s: float = 5.0
    steady_s: float = 10.0
    tries: int | None = None

    def after(self, previous_s: float, lived_s: float) -> float:
        """Return the next pause, given the last one (0: none) and how long it ran since."""
        if lived_s >= self.steady_s or not previous_s:
            return self.first_s
        return min(previous_s * 2, self.longest_s)


class Child:
    """One process and its successors.

    Args:
        name: For log lines.
        argv: The command line.
        say: Takes the name and a line of output or news.
        on_start: Called whenever a process was started.
        grace_s: Seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        say: Say,
        on_start: Callable[[], None] = lambda: None,
        backoff: Backoff | None = None,
        grace_s: float = 5.0,
    ) -> None:
        self.name = name
        self.pid: int | None = None
        self.starts = 0
        self._argv = tuple(argv)
        self._say = say
        self._on_start = on_start
        self._backoff = backoff or Backoff()
        self._grace_s = grace_s
        self._tries = self._backoff.tries
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._last_line = "it does not say why"

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.pid} starts={self.starts}>"

    async def run(self) -> None:
        """Keep the process running until `stop`.

        Raises:
            ServiceFailed: It ended as one that would refuse the same command line again,
                or was never steady in all its tries.
        """
        pause_s = 0.0
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                status = await self._live()
                if self._stopping.is_set():
                    return
                if status == _USAGE_STATUS:
                    raise ServiceFailed(f"{self.name} cannot start: {self._last_line}")
                lived_s = time.monotonic() - began
                self._check_tries(lived_s)
                pause_s = self._backoff.after(pause_s, lived_s)
                self._say(self.name, f"ended with status {status}; starts again in {pause_s:g} s")
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stopping.wait()
        finally:
            self.pid = None
            self._ended.set()

    def _check_tries(self, lived_s: float) -> None:
        if lived_s >= self._backoff.steady_s:
            # It can work: whatever ends it from now on may pass.
            self._tries = None
        elif self._tries is not None and self.starts >= self._tries:
            raise ServiceFailed(f"{self.name} does not stay up: {self._last_line}")

    async def stop(self) -> None:
        """End the process for good; returns when it is gone."""
        self._stopping.set()
        await self._ended.wait()

    async def _live(self) -> int:
        """Start the process and wait for its end, or end it when asked to."""
        async with _pipe() as (stream, write_fd):
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write_fd,
                    stderr=write_fd,
                    env=child_environment(PYTHONUNBUFFERED="1"),
                    start_new_session=True,
                    preexec_fn=_die_with_parent(os.getpid()),
                )
            finally:
                os.close(write_fd)
            self.pid = process.pid
            self.starts += 1
            self._on_start()
            return await self._watch(process, stream)

    async def _watch(self, process: Process, stream: asyncio.StreamReader) -> int:
        reading = asyncio.ensure_future(self._read(stream))
        stopping = asyncio.ensure_future(self._stopping.wait())
        ending = asyncio.ensure_future(process.wait())
        try:
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                await self._terminate(process, ending)
        finally:
            # Also what the process left behind in its group.
            _signal_group(process.pid, signal.SIGKILL)
            stopping.cancel()
            await ending
            # Its children in other groups may hold the pipe a moment longer.
            await asyncio.wait({reading}, timeout=1)
            reading.cancel()
        return ending.result()

    async def _terminate(
        self, process: asyncio.subprocess.Process, ending: asyncio.Task[int]
    ) -> None:
        with suppress(ProcessLookupError):
            process.terminate()
        _, late = await asyncio.wait({ending}, timeout=self._grace_s)
        if late:
            self._say(self.name, f"still there after {self._grace_s:g} s; killed")
            _signal_group(process.pid, signal.SIGKILL)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        held = b""
        while data := await stream.read(_MAX_LINE):
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                self._heard(line)
            if len(held) > _MAX_LINE:
                self._heard(held)
                held = b""
        if held:
            self._heard(held)

    def _heard(self, raw: bytes) -> None:
        line = raw.decode(errors="replace")
        self._last_line = line.strip() or self._last_line
        self._say(self.name, line)


@asynccontextmanager
async def _pipe() -> AsyncGenerator[tuple[asyncio.StreamReader, int], None]:
    """Yield a pipe's reader and its write end, which the caller closes.

    Not asyncio's PIPE: with it, `Process.wait` waits until all that inherited the pipe are gone.
    """
    read_fd, write_fd = os.pipe()
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_fd, "rb")
    )
    try:
        yield stream, write_fd
    finally:
        transport.close()


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _die_with_parent(parent: int) -> Callable[[], None]:
    def ask_kernel() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)

    return ask_kernel
