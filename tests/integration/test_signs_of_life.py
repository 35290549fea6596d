"""What real ranks show of their work, and what their front shows without them."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.fleet import Output, ask, running_fleet, spec
from tests.fakes.rank_processes import ranks_of
from tests.fakes.worker import FAST
from tests.fakes.worker_front import run_front

pytestmark = [pytest.mark.e2e]

# 40 steps of 0.1 s; one request at a time.
PACE: dict[str, Any] = {
    "fake_prefill_tokens_per_s": 100,
    "max_batched_tokens": 16,
    "max_running": 1,
}
PROMPT = list(range(4, 404))


async def test_a_long_prefill_and_the_queue_behind_it_show_signs_of_life_and_a_frozen_rank_none(
    model_dir: Path,
) -> None:
    async with (
        run_front(model_dir, limits=FAST, **PACE) as address,
        running_fleet(address, ready=1) as fleet,
    ):
        outputs, bookings = [], []
        for first in (4, 5):
            prompt = [first, *PROMPT]
            outputs.append(Output())
            bookings.append(fleet.place(ask(prompt)))
            fleet.submit(bookings[-1], spec(prompt), outputs[-1])
        await outputs[0].until(lambda output: output.cached_tokens is not None)
        longest = await longest_silence(bookings[1].silent_s, seconds=2.0)
        assert not outputs[0].ids
        assert outputs[1].cached_tokens is None
        assert longest < 1.0
        [rank] = ranks_of(os.getpid(), "dp=0")
        rank.send_signal(signal.SIGSTOP)
        # The front lives and repeats the load of its replica every second.
        assert await longest_silence(bookings[1].silent_s, seconds=2.5) > 1.5
        rank.send_signal(signal.SIGCONT)
        async with asyncio.timeout(5):
            while bookings[1].silent_s() > 0.5:
                await fleet.changed()


async def longest_silence(silent_s: Callable[[], float], *, seconds: float) -> float:
    """Look for some seconds."""
    loop = asyncio.get_running_loop()
    until, longest = loop.time() + seconds, 0.0
    while loop.time() < until:
        longest = max(longest, silent_s())
        await asyncio.sleep(0.02)
    return longest
