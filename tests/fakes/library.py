"""An engine on the fake model, for tests of the library."""

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.rank_processes import ranks_of
from worker import Engine


@contextmanager
def fake_engine(model_dir: Path, **fields: Any) -> Generator[Engine, None, None]:
    """Run an engine whose ids are those of `tests/fakes/oracle.py`."""
    with Engine(model_dir, engine="fake", **fields) as engine:
        yield engine


def my_ranks(place: str = "") -> list[psutil.Process]:
    """Rank processes of this test's engines."""
    return ranks_of(os.getpid(), place)


def kill(place: str) -> None:
    """Kill the one rank at a place, as in `dp=0 pp=0 tp=1`."""
    [victim] = my_ranks(place)
    victim.send_signal(signal.SIGKILL)
