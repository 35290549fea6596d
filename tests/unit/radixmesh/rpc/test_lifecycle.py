"""Lifecycle: signals stop a service once, politely; twice, at once."""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator

import pytest
import setproctitle

from radixmesh.rpc.lifecycle import run_until_signal, set_title, start


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Logging and title are put back."""
    root = logging.getLogger()
    handlers, level, title = list(root.handlers), root.level, setproctitle.getproctitle()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    setproctitle.setproctitle(title)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_asks_the_service_to_stop(number: signal.Signals) -> None:
    finished = False

    async def main(stop: asyncio.Event) -> None:
        nonlocal finished
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 5)
        finished = True

    await run_until_signal(main)
    assert finished


async def test_a_second_signal_cancels_a_service_that_does_not_stop() -> None:
    cleaned = False

    async def main(stop: asyncio.Event) -> None:
        nonlocal cleaned
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned = True

    with pytest.raises(asyncio.CancelledError):
        await run_until_signal(main)
    assert cleaned


async def test_a_service_may_end_by_itself() -> None:
    async def main(stop: asyncio.Event) -> None:
        assert not stop.is_set()

    await run_until_signal(main)


def test_a_title_begins_with_the_services_name() -> None:
    async def main(stop: asyncio.Event) -> None:
        assert setproctitle.getproctitle() == "radixmesh-worker smollm2 :30100"

    assert start("radixmesh-worker", main, title="smollm2 :30100") == 0
    set_title("x")
    assert setproctitle.getproctitle() == "x"


def test_a_service_that_cannot_listen_says_so_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def main(stop: asyncio.Event) -> None:
        raise OSError("cannot listen on 127.0.0.1:80")

    assert start("radixmesh-worker", main) == 1
    printed = capsys.readouterr().err
    assert "cannot start error='cannot listen on 127.0.0.1:80'" in printed
    assert "Traceback" not in printed
