"""Runs many replays in processes, and names what each was. One row of figures a run."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from bench.replay import trace, workloads
from bench.replay.job import ReplayError, Scenario, ceiling_tokens
from bench.replay.rivals import chooser
from bench.replay.simulate import Replay, Setup
from router.policy.price import SHAPE, Shape

Row = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run.

    Attributes:
        source: Path of a trace, or name of a workload.
        limit: So many first requests of a trace; 0 means all.
        spread: Whether requests of one timestamp of a trace come one after the other.
        shape: Constants of the price.
    """

    source: Path | str
    policy: str
    setup: Setup = field(default_factory=Setup)
    limit: int = 0
    spread: bool = False
    shape: Shape = SHAPE


@lru_cache(maxsize=2)
def scenario_of(source: Path | str, limit: int, seed: int, *, spread: bool) -> Scenario:
    """Read or make what is to be replayed.

    Raises:
        ReplayError: The trace can't be read, or no workload has this name.
    """
    if isinstance(source, Path):
        return trace.read(source, limit=limit, spread=spread)
    return workloads.make(source, seed)


def run(task: Task) -> Row:
    """Replay once and return the row.

    Raises:
        ReplayError: It can't be replayed as asked.
    """
    seed = 0 if isinstance(task.source, Path) else task.setup.seed
    scenario = scenario_of(task.source, task.limit, seed, spread=task.spread)
    setup = replace(task.setup, shape=task.shape)
    outcome = Replay(scenario, setup, chooser(task.policy)).run()
    asked = sum(job.tokens for job in scenario.jobs)
    return {
        "policy": task.policy,
        "workload": scenario.name,
        "load": setup.load or scenario.load,
        "replicas": setup.replicas or scenario.replicas,
        "routers": setup.routers,
        "seed": setup.seed,
        "spread": task.spread,
        "model": "prefill" if setup.serial else "full",
        "ceiling": round(ceiling_tokens(scenario) / asked, 4),
        **outcome.row(),
    }


def run_all(tasks: Sequence[Task], *, processes: int = 0) -> Iterator[Row]:
    """Iterate over the rows of all tasks, in their order.

    Raises:
        ReplayError: One can't be replayed as asked.
    """
    count = min(processes or os.cpu_count() or 1, len(tasks))
    if count <= 1:
        yield from map(run, tasks)
        return
    with ProcessPoolExecutor(count, initializer=_quiet) as pool:
        yield from pool.map(run, tasks)


def _quiet() -> None:
    """Log no lost changes of a feed: that it is lossy is what was asked for."""
    logging.getLogger("router").setLevel(logging.ERROR)


HEAD = (
    f"{'workload':28}{'load':>5} {'policy':16}{'hit':>7}"
    f"{'mean s':>9}{'p50 s':>9}{'p99 s':>9}{'imb':>6}"
)


def line(row: Row) -> str:
    """Return a row as a line of the table that `HEAD` heads."""
    numbers = [float(str(row[key])) for key in ("hit", "ttft_mean_s", "ttft_p50_s", "ttft_p99_s")]
    hit, mean, p50, p99 = numbers
    return (
        f"{str(row['workload'])[:27]:28}{row['load']:>5} {row['policy']:16}"
        f"{hit:7.3f}{mean:9.3f}{p50:9.3f}{p99:9.2f}{float(str(row['imbalance'])):6.2f}"
    )


def names_of(wanted: str, known: Iterable[str]) -> list[str]:
    """Return the names in a list with commas; `all` means all.

    Raises:
        ReplayError: One of them is not known.
    """
    every = list(known)
    if wanted == "all":
        return every
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in every:
            raise ReplayError(f"{name!r} is not known; there are {', '.join(every)}")
    return names
