"""A supervised process: started again, ended for good, never left behind."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

import psutil
import pytest

from radixmesh.cli.processes import Backoff, Child, ServiceFailed

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"


class Lines:
    """Keeps what a child says, and lets a test wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = asyncio.Condition()

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(line)
        self._waker = asyncio.ensure_future(self._wake())

    async def _wake(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def until(self, word: str, count: int = 1) -> None:
        async with asyncio.timeout(15), self._news:
            await self._news.wait_for(lambda: sum(word in line for line in self.lines) >= count)


def child(code: str, say: Lines, *, grace_s: float = 5.0) -> Child:
    backoff = Backoff(first_s=0.01, longest_s=0.02)
    return Child("it", [sys.executable, "-c", code], say=say, backoff=backoff, grace_s=grace_s)


def alive(pids: Sequence[int]) -> list[int]:
    return [
        pid
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


async def test_a_process_that_dies_is_started_again() -> None:
    say = Lines()
    it = child(SLEEPER, say)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.run())
        await say.until("up")
        first = it.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await say.until("up", 2)
        assert it.pid not in {first, None}
        assert it.starts == 2
        await it.stop()
    assert any("ended with status -9" in line for line in say.lines)
    assert it.pid is None


async def test_stopping_ends_a_process_that_ignores_sigterm() -> None:
    say = Lines()
    it = child(STUBBORN, say, grace_s=0.1)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.run())
        await say.until("up")
        pid = it.pid
        assert pid is not None
        await it.stop()
    assert alive([pid]) == []
    assert any("killed" in line for line in say.lines)


async def test_what_a_process_started_in_its_group_goes_with_it() -> None:
    say = Lines()
    it = child(PARENT, say)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.run())
        await say.until("up", 2)
        assert it.pid is not None
        pids = [it.pid, *(each.pid for each in psutil.Process(it.pid).children(recursive=True))]
        assert len(pids) == 2
        await it.stop()
    psutil.wait_procs([psutil.Process(pid) for pid in alive(pids)], timeout=5)
    assert alive(pids) == []


async def test_cancelling_the_supervisor_kills_the_process() -> None:
    say = Lines()
    it = child(STUBBORN, say)
    running = asyncio.ensure_future(it.run())
    await say.until("up")
    process = psutil.Process(it.pid)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    process.wait(timeout=5)


async def test_refused_flags_are_final() -> None:
    say = Lines()
    with pytest.raises(ServiceFailed, match="it cannot start: no such flag"):
        await child("import sys; print('no such flag'); sys.exit(2)", say).run()
    assert say.lines == ["no such flag"]


async def test_a_process_that_cannot_be_started_is_not_started_for_ever() -> None:
    with pytest.raises(OSError, match="nothing-here"):
        await Child("it", ["/nothing-here"], say=Lines()).run()


async def test_a_process_dies_with_its_supervisor() -> None:
    code = (
        "import asyncio, sys\n"
        "from radixmesh.cli.processes import Child\n"
        "async def main():\n"
        "    child = Child('it', [sys.executable, '-c', 'import time; time.sleep(600)'],\n"
        "                  say=print, on_start=lambda: print(child.pid, flush=True))\n"
        "    await child.run()\n"
        "asyncio.run(main())\n"
    )
    supervisor = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
    )
    assert supervisor.stdout is not None
    orphan = psutil.Process(int(await supervisor.stdout.readline()))
    supervisor.kill()
    await supervisor.wait()
    orphan.wait(timeout=5)


async def test_long_and_broken_lines_come_through() -> None:
    say = Lines()
    code = (
        "import sys, time; out = sys.stdout.buffer\n"
        "out.write(b'\\xff\\n' + b'x' * 40000 + b'\\n' + b'tail'); out.flush(); time.sleep(600)"
    )
    it = child(code, say)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.run())
        await say.until("x")
        await it.stop()
    assert say.lines[0] == "�"
    assert sum(line.count("x") for line in say.lines) == 40000
    assert say.lines[-1] == "tail"


def test_pauses_double_to_a_bound_and_begin_anew_after_a_long_life() -> None:
    backoff = Backoff(first_s=0.2, longest_s=1.0, steady_s=10.0)
    pauses = [0.0]
    for _ in range(4):
        pauses.append(backoff.after(pauses[-1], 0.1))
    assert pauses[1:] == [0.2, 0.4, 0.8, 1.0]
    assert backoff.after(1.0, 11.0) == 0.2


async def test_a_process_that_never_stays_up_is_given_up_with_its_last_words() -> None:
    say = Lines()
    backoff = Backoff(first_s=0.01, longest_s=0.02, tries=3)
    it = Child("it", [sys.executable, "-c", "print('no port'); exit(1)"], say=say, backoff=backoff)
    async with asyncio.timeout(15):
        with pytest.raises(ServiceFailed, match="it does not stay up: no port"):
            await it.run()
    assert it.starts == 3


async def test_a_process_that_was_steady_once_is_never_given_up() -> None:
    say = Lines()
    backoff = Backoff(first_s=0.01, longest_s=0.02, steady_s=0.0, tries=1)
    it = Child("it", [sys.executable, "-c", "print('up'); exit(1)"], say=say, backoff=backoff)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(it.run())
        await say.until("up", 3)
        await it.stop()
