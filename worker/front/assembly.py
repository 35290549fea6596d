"""Makes a running worker group from its settings: the one launch path of service and library.

Knows settings, replicas and their supervisors; knows neither gRPC nor who asks.
"""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import NoReturn

from prometheus_client import CollectorRegistry

from radixmesh.models import tokenizer_fingerprint
from radixmesh.telemetry.metrics import WorkerMetrics
from worker.config import FakeConfig, RankConfig
from worker.front.crew import Crew
from worker.front.description import GroupSpec
from worker.front.group import Group
from worker.front.meters import Meters
from worker.front.probes import ProbePace
from worker.front.replica import Hold
from worker.front.supervisor import GroupEnded, Launch, Pace
from worker.front.ways import choose_carrier, choose_tensors
from worker.node.launcher import RankLauncher, open_launcher
from worker.settings import WorkerSettings

TICK_S = 1.0
# The front gives up a stuck replica a little after the stuck rank itself, which can say where.
WATCHDOG_SLACK_S = 2.0


def make_group(settings: WorkerSettings, model_dir: Path, registry: CollectorRegistry) -> Group:
    """Return a group of which nothing runs yet; its metrics are in `registry`.

    Raises:
        OSError: The tokenizer of `model_dir` can't be read.
    """
    spec = group_spec(settings, tokenizer_fingerprint(model_dir))
    return Group(spec, Meters(WorkerMetrics(registry)), asyncio.get_running_loop().time)


@asynccontextmanager
async def running(
    group: Group, settings: WorkerSettings, model_dir: Path, launch: Launch | None = None
) -> AsyncGenerator[Callable[[], list[int]], None]:
    """Keep the replicas of a group alive inside the block; their ranks are gone after it.

    Yields what tells which further hosts are not there, so that no ranks start.
    A failure that ends the group cancels the block, and is raised at its end.

    Args:
        group: From `make_group`.
        settings: Of the whole group.
        model_dir: The Hugging Face directory that `settings.model` stands for.
        launch: Starts the ranks of a replica; None starts processes.

    Raises:
        CannotStart: The ranks refuse their configuration.
        KeepsFailing: All replicas have failed again and again.
        OSError: The port where further hosts come can't be had.
    """
    base = rank_config(settings, str(model_dir))
    pace = Pace(startup_s=settings.startup_timeout_s, max_failures=settings.max_failures)
    opened = (
        nullcontext(launch)
        if launch
        else open_launcher(
            base,
            nnodes=settings.nnodes,
            meeting=settings.meeting_place,
            work=_Work(group),
            startup_s=settings.startup_timeout_s,
        )
    )
    try:
        async with opened as launch, asyncio.TaskGroup() as tasks:
            crew = Crew(group, launch, pace, retire_grace_s=settings.drain_grace_s)
            alive = [
                tasks.create_task(crew.run()),
                tasks.create_task(_every(TICK_S, group.tick)),
                tasks.create_task(_every(group.probes.pace.tick_s, group.probe)),
            ]
            yield lambda: launch.missing if isinstance(launch, RankLauncher) else []
            for task in alive:
                task.cancel()
    except BaseExceptionGroup as failures:
        if ended := failures.subgroup(GroupEnded):
            raise _first(ended) from failures
        raise


class _Work:
    """A group's requests, as hosts that leave know them."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def hold(self) -> None:
        self._group.roster.hold_all(Hold.LEAVING)

    def go_on(self) -> None:
        self._group.roster.release_all(Hold.LEAVING)

    async def idle(self) -> None:
        await self._group.idle()


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    # All replicas are told the same: what ended the first one says enough.
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first


def group_spec(settings: WorkerSettings, fingerprint: str) -> GroupSpec:
    """Return what the settings say of a group."""
    return GroupSpec(
        model=settings.served_name,
        weight_version=settings.weight_version,
        fingerprint=fingerprint,
        engine=settings.engine,
        dp=settings.dp,
        pp=settings.pp,
        tp=settings.tp,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_batched_tokens=settings.max_batched_tokens,
        dispatch=settings.dispatch,
        probes=ProbePace(
            interval_s=settings.probe_interval_s,
            timeout_s=settings.probe_timeout_s,
            give_up_s=settings.step_timeout_s + WATCHDOG_SLACK_S,
            reading_s=settings.startup_timeout_s,
        ),
    )


def rank_config(settings: WorkerSettings, model_dir: str) -> RankConfig:
    """Return what all ranks of this host are told."""
    return RankConfig(
        model_dir=model_dir,
        engine=settings.engine,
        dp=settings.dp,
        pp=settings.pp,
        tp=settings.tp,
        block_tokens=settings.block_tokens,
        kv_tokens=settings.kv_tokens,
        kv_bytes=settings.kv_bytes,
        max_model_len=settings.max_model_len,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_batched_tokens=settings.max_batched_tokens,
        threads=settings.rank_threads,
        dtype=settings.dtype,
        fake=FakeConfig(
            eos_after=settings.fake_eos_after,
            prefill_tokens_per_s=settings.fake_prefill_tokens_per_s,
            decode_ms=settings.fake_decode_ms,
            kv_blocks=settings.fake_kv_blocks,
            faults=tuple(settings.fake_faults),
        ),
        order=settings.order,
        ageing_ms=round(settings.ageing_s * 1000),
        overlap=settings.overlap == "on",
        step_timeout_s=settings.step_timeout_s,
        peer_timeout_s=settings.peer_timeout_s,
        carrier=choose_carrier(settings),
        tensors=choose_tensors(settings),
        spin=settings.ranks_here <= len(os.sched_getaffinity(0)),
        log_level=settings.log_level.upper(),
    )


async def _every(seconds: float, do: Callable[[], None]) -> NoReturn:
    # Both of these are all the timers of an idle group.
    while True:
        await asyncio.sleep(seconds)
        do()
