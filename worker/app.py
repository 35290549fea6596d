"""The composition root of a worker group's front: everything is constructed and connected here."""

import asyncio
import logging
import uuid
from collections.abc import Callable
from contextlib import aclosing

from prometheus_client import CollectorRegistry

from radixmesh.models import resolve
from radixmesh.rpc.frames import DEFAULT_LIMITS
from radixmesh.rpc.link import Identity, LinkLimits
from radixmesh.rpc.server import Server
from radixmesh.telemetry.metrics import serve_metrics
from worker.front.assembly import make_group, rank_config, running
from worker.front.group import Group
from worker.front.service import SERVICE_NAME, WorkerService
from worker.front.supervisor import Launch
from worker.node.agent import Agent
from worker.node.agreement import shared_settings
from worker.node.host import Host
from worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

# After the last token, or a refusal, calls may take so long to pass it on.
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
        KeepsFailing: All replicas have failed again and again.
        OSError: A port can't be had.
    """
    model_dir = resolve(settings.model)
    registry = CollectorRegistry()
    group = make_group(settings, model_dir, registry)
    service = WorkerService(group, Identity("worker", uuid.uuid4().hex), limits)
    server = Server(f"{settings.host}:{settings.port}", [(SERVICE_NAME, service.add_to)])
    metrics = serve_metrics(settings.metrics_port, registry, host=settings.host)
    try:
        on_listening(await server.start())
        async with running(group, settings, model_dir, launch), asyncio.TaskGroup() as tasks:
            health = tasks.create_task(_tell_health(group, server))
            await stop.wait()
            await _drain(group, server, settings.drain_grace_s)
            health.cancel()
    finally:
        if not group.description.known:
            group.description.end()
            await asyncio.sleep(LAST_WRITES_S)
        await server.stop()
        if metrics is not None:
            metrics.close()


async def serve_node(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Run this host's ranks for host 0 until `stop` is set and nothing runs that needs them.

    Raises:
        InvalidRequest: There is no such model, or host 0 was told something else.
    """
    model_dir = resolve(settings.model)
    base = rank_config(settings, str(model_dir))
    host = Host(
        base,
        nnodes=settings.nnodes,
        node_rank=settings.node_rank,
        startup_s=settings.startup_timeout_s,
    )
    agent = Agent(host, settings.node_rank, shared_settings(base, settings.nnodes))
    address, port = settings.meeting_place
    async with aclosing(host):
        serving = asyncio.ensure_future(agent.run(address, int(port)))
        stopped = asyncio.ensure_future(_stop_node(agent, stop, settings.drain_grace_s))
        try:
            await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            serving.cancel()
            await asyncio.wait((serving,))
        if not serving.cancelled():
            serving.result()


async def _stop_node(agent: Agent, stop: asyncio.Event, grace_s: float) -> None:
    # What runs is host 0's to finish; it gives out nothing new that needs this host.
    await stop.wait()
    logger.info("leaving", extra={"grace_s": grace_s})
    try:
        async with asyncio.timeout(grace_s):
            await agent.leave()
    except TimeoutError:
        logger.warning("grace is over, ranks still run")


async def _tell_health(group: Group, server: Server) -> None:
    while True:
        ready = group.ready
        await server.health.set(SERVICE_NAME, ready)
        await group.changed.until(lambda was=ready: group.ready != was)  # type: ignore[misc]


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
