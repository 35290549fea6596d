"""What a stuck rank leaves in the log: every thread's stack, and how far it had come.

A rank whose own step is stuck finds that itself and ends. A rank that waits for input
is not stuck as far as it can know: the watchdog counts only inside a step. That one of
them waits for something that never comes is found from outside, by a probe that is not
answered; then all ranks of the replica are told to write their stacks before they are
killed. Costs a step two assignments and an idle rank a few wake-ups a minute.
"""

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

logger = logging.getLogger(__name__)

STUCK_EXIT_STATUS: Final = 70
DUMP_SIGNAL: Final = signal.SIGUSR1


def dump_on_signal(state: object) -> None:
    """Write all stacks and `repr(state)` to the log whenever the signal comes.

    The stacks come also from a thread that is stuck in native code; the state comes once
    the main thread runs Python again, so not from there. May be called again. Only the
    main thread may call it.
    """

    def say(*_: object) -> None:
        logger.error("rank is given up", extra={"state": repr(state)})

    faulthandler.unregister(DUMP_SIGNAL)
    signal.signal(DUMP_SIGNAL, say)
    faulthandler.register(DUMP_SIGNAL, all_threads=True, chain=True)


def die_with_stacks() -> None:
    """Write all stacks to stderr and end the process at once; nothing can be unwound."""
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    os._exit(STUCK_EXIT_STATUS)


class Watchdog:
    """Watches one thread's steps."""

    def __init__(
        self,
        limit_s: float,
        *,
        state: object = None,
        on_stuck: Callable[[], None] = die_with_stacks,
    ) -> None:
        """A step of more than `limit_s` seconds is stuck; `repr(state)` goes to the log then."""
        self._limit_s = limit_s
        self._state = state
        self._on_stuck = on_stuck
        self._began: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count the time of this block."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count this block, which is part of a step; what follows it counts anew."""
        self._began = None
        try:
            yield
        finally:
            self._began = time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(self._limit_s / 4):
            began = self._began
            if began is not None and time.monotonic() - began > self._limit_s:
                extra = {"limit_s": self._limit_s, "state": repr(self._state)}
                logger.error("step is stuck", extra=extra)
                self._on_stuck()
                return
