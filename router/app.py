"""The router as a service: its edges around `router/core.py`, and the order of start and stop.

Routes nothing.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Protocol

from radixmesh.errors import Draining
from radixmesh.rpc.link import LinkLimits
from radixmesh.rpc.server import Server
from radixmesh.telemetry.metrics import serve_metrics
from router.core import Core, build
from router.edge.admission import ApiKey
from router.edge.fleet import SERVICE_NAME as FLEET_SERVICE
from router.edge.fleet import FleetService
from router.edge.grpc import SERVICE_NAME as ROUTER_SERVICE
from router.edge.grpc import RouterService
from router.edge.metered import Metered
from router.fleet.operation import flush_cache
from router.settings import RouterSettings

logger = logging.getLogger(__name__)

# Readiness is looked at after changes of the fleet, but no more often than this. The fleet
# changes at each of its ticks at the latest, and that also covers the text services.
HEALTH_PAUSE_S = 0.1
# Requests whose grace is over are cut so long after their clients were told.
LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the router listens; 0 for what is off."""

    grpc: int
    http: int
    fleet: int
    metrics: int


async def serve(
    settings: RouterSettings,
    stop: asyncio.Event,
    *,
    on_listening: Callable[[Ports], None] = lambda _: None,
    limits: LinkLimits | None = None,
) -> None:
    """Run the router until `stop` is set and running requests have ended.

    Args:
        settings: The flags.
        stop: Set it to drain and leave.
        on_listening: Told the bound ports.
        limits: Bounds and intervals of links.

    Raises:
        OSError: A port can't be had.
    """
    core = build(settings, limits=limits)
    async with _edges(settings, core, stop) as edges, asyncio.TaskGroup() as tasks:
        links = tasks.create_task(core.run())
        health = tasks.create_task(_tell_health(core, edges.public))
        logger.info("serving", extra=asdict(edges.ports))
        on_listening(edges.ports)
        await stop.wait()
        health.cancel()
        await _drain(settings, core, edges)
        links.cancel()


class Listener(Protocol):
    """The HTTP edge on its port."""

    async def start(self) -> int:
        """Listen; return the port."""
        ...

    async def stop(self, *, grace_s: float) -> None:
        """Let running requests end, cancel the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    public: Server
    admin: Server
    http: Listener | None
    ports: Ports


@asynccontextmanager
async def _edges(
    settings: RouterSettings, core: Core, stop: asyncio.Event
) -> AsyncGenerator[_Edges]:
    """Listen everywhere; on leaving close what is still open."""
    generate = RouterService(
        Metered(core.pipeline, core.metrics, edge="grpc"),
        api_key=ApiKey(settings.api_key),
        request_timeout_s=settings.request_timeout_s,
        write_timeout_s=settings.write_timeout_s,
    )
    operate = FleetService(core.fleet, core.pipeline)
    public = Server(f"{settings.host}:{settings.port}", [(ROUTER_SERVICE, generate.add_to)])
    admin = Server(f"{settings.host}:{settings.fleet_port}", [(FLEET_SERVICE, operate.add_to)])
    page = serve_metrics(
        settings.metrics_port, core.metrics.registry, host=settings.metrics_host or settings.host
    )
    http = _http(settings, core, stop)
    try:
        ports = Ports(
            grpc=await public.start(),
            http=await http.start() if http else 0,
            fleet=await admin.start(),
            metrics=page.port if page else 0,
        )
        yield _Edges(public=public, admin=admin, http=http, ports=ports)
    finally:
        if http:
            await http.stop(grace_s=0)
        await public.stop()
        await admin.stop()
        if page:
            page.close()


def _http(settings: RouterSettings, core: Core, stop: asyncio.Event) -> Listener | None:
    if not settings.http:
        return None
    # Only here: the `http` extra may not be installed.
    from router.edge.http import HttpLimits, build_http
    from router.edge.listener import HttpListener
    from router.edge.workers import WorkersAccess, add_workers

    limits = HttpLimits(
        api_key=settings.api_key,
        cors_origins=tuple(settings.cors_origins),
        request_timeout_s=settings.request_timeout_s,
        write_timeout_s=settings.write_timeout_s,
    )
    app = build_http(
        Metered(core.pipeline, core.metrics, edge="http"),
        ready=lambda: not stop.is_set() and core.readiness.check(),
        registry=core.metrics.registry,
        limits=limits,
    )
    access = WorkersAccess(
        on=settings.workers_api,
        api_key=settings.api_key,
        leave_grace_s=settings.leave_grace_s,
    )
    add_workers(app, core.fleet, access, flush_cache)
    unread_s = 2 * settings.write_timeout_s
    return HttpListener(app, settings.host, settings.http_port, unread_s=unread_s)


async def _tell_health(core: Core, public: Server) -> None:
    """Say on the health service whether requests are wanted."""
    was: bool | None = None
    while True:
        ready = core.readiness.check()
        if ready is not was:
            logger.info("ready" if ready else "not ready")
            await public.health.set(ROUTER_SERVICE, ready)
            was = ready
        await core.fleet.changed()
        await asyncio.sleep(HEALTH_PAUSE_S)


async def _drain(settings: RouterSettings, core: Core, edges: _Edges) -> None:
    """Say that no new work is wanted, settle, then let running requests end."""
    logger.info("draining", extra={"running": core.admission.running})
    await edges.public.drain(settings.settle_s)
    began = time.monotonic()
    late = asyncio.get_running_loop().call_later(
        settings.drain_grace_s, core.end, Draining("the router stops")
    )
    grace_s = settings.drain_grace_s + LAST_WORDS_S
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(edges.public.stop(grace_s))
            if edges.http:
                tasks.create_task(edges.http.stop(grace_s=grace_s))
    finally:
        late.cancel()
    logger.info("drained", extra={"seconds": round(time.monotonic() - began, 3)})
