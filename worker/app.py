"""The composition root of a worker group's front: everything is constructed and connected here."""

import asyncio
import logging
import uuid
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from radixmesh.models import resolve, tokenizer_fingerprint
from radixmesh.rpc.frames import DEFAULT_LIMITS
from radixmesh.rpc.link import Identity, LinkLimits
from radixmesh.rpc.server import Server
from radixmesh.telemetry.metrics import WorkerMetrics, serve_metrics
from worker.config import FakeConfig, RankConfig
from worker.front.group import Group
from worker.front.meters import Meters
from worker.front.plan import GroupPlan
from worker.front.ranks import RankLauncher
from worker.front.service import SERVICE_NAME, WorkerService
from worker.front.supervisor import CannotStart, Launch, Pace, Supervisor
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

TICK_S = 1.0
# The front gives up a stuck replica a little after the stuck rank itself, which can say where.
WATCHDOG_SLACK_S = 2.0
# After the last token, links may take so long to pass it on.
LAST_WRITES_S = 0.2


async def serve(
    settings: WorkerSettings,
    stop: asyncio.Event,
    *,
    on_listening: Callable[[int], None] = lambda _: None,
    launch: Launch | None = None,
    limits: LinkLimits = DEFAULT_LIMITS,
) -> None:
    """Run a worker group until `stop` is set and it has drained.

    Args:
        settings: Of the whole group.
        stop: Set it to drain and leave.
        on_listening: Told the bound port.
        launch: Starts the ranks of a replica; None starts processes.
        limits: Of the links to routers.

    Raises:
        InvalidRequest: There is no such model.
        CannotStart: The ranks refuse their configuration.
        OSError: A port can't be had.
    """
    model_dir = resolve(settings.model)
    registry = CollectorRegistry()
    plan = group_plan(settings, tokenizer_fingerprint(model_dir))
    group = Group(plan, Meters(WorkerMetrics(registry)), asyncio.get_running_loop().time)
    launch = launch or RankLauncher(rank_config(settings, str(model_dir)))
    pace = Pace(startup_s=settings.startup_timeout_s)
    identity = Identity("worker", uuid.uuid4().hex)
    service = WorkerService(group, identity, limits)
    server = Server(f"{settings.host}:{settings.port}", [(SERVICE_NAME, service.add_to)])
    metrics = serve_metrics(settings.metrics_port, registry, host=settings.host)
    try:
        on_listening(await server.start())
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(Supervisor(replica, group, launch, pace).run())
                for replica in group.replicas
            ]
            running.append(tasks.create_task(_tick(group)))
            running.append(tasks.create_task(_tell_health(group, server)))
            await stop.wait()
            await _drain(group, server, settings.drain_grace_s)
            for task in running:
                task.cancel()
    except BaseExceptionGroup as group:
        # All replicas are told the same: the first one's refusal says enough.
        if refused := group.subgroup(CannotStart):
            raise refused.exceptions[0] from group
        raise
    finally:
        await server.stop()
        if metrics is not None:
            metrics.close()


def group_plan(settings: WorkerSettings, fingerprint: str) -> GroupPlan:
    """Return what the settings say of a group."""
    return GroupPlan(
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
        step_timeout_s=settings.step_timeout_s + WATCHDOG_SLACK_S,
    )


def rank_config(settings: WorkerSettings, model_dir: str) -> RankConfig:
    """Return what all ranks of the group are told."""
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
        step_timeout_s=settings.step_timeout_s,
        log_level=settings.log_level.upper(),
    )


async def _tick(group: Group) -> None:
    # The only timer of an idle group.
    while True:
        await asyncio.sleep(TICK_S)
        group.tick()


async def _tell_health(group: Group, server: Server) -> None:
    changed = asyncio.Event()
    group.on_change = changed.set
    while True:
        await server.health.set(SERVICE_NAME, group.ready)
        await changed.wait()
        changed.clear()


async def _drain(group: Group, server: Server, grace_s: float) -> None:
    await server.drain()
    running = group.drain()
    logger.info("draining", extra={"running": running, "grace_s": grace_s})
    try:
        async with asyncio.timeout(grace_s):
            await group.idle()
    except TimeoutError:
        logger.warning("grace is over", extra={"running": group.job_count})
    await asyncio.sleep(LAST_WRITES_S)
