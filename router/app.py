"""The composition root of the router: everything is constructed and connected here.

Knows the order of start and stop; routes nothing.
"""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Protocol

from prometheus_client import CollectorRegistry

from radixmesh.errors import Draining, MeshError
from radixmesh.rpc.link import Identity, LinkLimits
from radixmesh.rpc.server import Server
from radixmesh.telemetry.metrics import RouterMetrics, serve_metrics
from router.discovery.discovery import Discovery
from router.discovery.targets import GroupTarget, PoolTarget
from router.edge.admission import Admission, ApiKey, TokenLimits
from router.edge.fleet import SERVICE_NAME as FLEET_SERVICE
from router.edge.fleet import FleetService
from router.edge.grpc import SERVICE_NAME as ROUTER_SERVICE
from router.edge.grpc import RouterService
from router.edge.metered import Metered
from router.edge.permit import Told
from router.edge.tenants import Rate, Tenants
from router.fleet.breaker import BreakerLimits
from router.fleet.feed import Index
from router.fleet.fitness import Judges
from router.fleet.meters import Meters
from router.fleet.operation import flush_cache
from router.fleet.outliers import OutlierLimits
from router.fleet.registry import Fleet
from router.fleet.worker_link import WorkerLink
from router.gauges import Links, watch
from router.membership import Targets, discovery_of
from router.pipeline import Pace, Pipeline
from router.policy.baselines import CacheAware
from router.policy.choice import Policy
from router.policy.policies import POLICIES
from router.ports import Texts
from router.readiness import Readiness
from router.settings import RouterSettings, TenantLimits
from router.text.detokenizers import DetokenizerInstance, Detokenizers
from router.text.pool import Pool
from router.text.tokenizers import TokenizerInstance, Tokenizers
from router.tree.meta_tree import MetaTree

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The router without its edges."""

    metrics: RouterMetrics
    fleet: Fleet
    tokenizers: Pool[TokenizerInstance]
    detokenizers: Pool[DetokenizerInstance]
    admission: Admission
    pipeline: Pipeline
    discovery: Discovery
    readiness: Readiness

    def end(self, error: MeshError) -> None:
        """End all requests, those that wait and those that run, by an error."""
        self.admission.end(error)
        self.pipeline.end(error)

    async def run(self) -> None:
        """Keep all links up, and those that are there known, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.discovery.run())
            tasks.create_task(self.fleet.run())
            tasks.create_task(self.tokenizers.run())
            tasks.create_task(self.detokenizers.run())


def build(settings: RouterSettings, *, limits: LinkLimits | None = None) -> Core:
    """Construct the router without its edges; nothing is started.

    Args:
        settings: The flags.
        limits: Bounds and intervals of links.
    """
    limits = limits or LinkLimits()
    identity = Identity("router", uuid.uuid4().hex)
    rng = random.Random()
    metrics = RouterMetrics(CollectorRegistry())
    index = _index(settings, metrics)
    fleet = Fleet(
        [],
        policy=policy_of(settings),
        connect=lambda address, events: WorkerLink(
            address, events, identity=identity, limits=limits, rng=rng
        ),
        index=index,
        judges=_judges(settings, index.meters),
        rng=rng,
    )
    tokenizers: Pool[TokenizerInstance] = Pool(
        "tokenizer", rng=rng, on_lost=metrics.links_lost.labels("tokenizer").inc
    )
    detokenizers: Pool[DetokenizerInstance] = Pool(
        "detokenizer", rng=rng, on_lost=metrics.links_lost.labels("detokenizer").inc
    )
    targets = Targets(
        groups=GroupTarget(fleet, drain_s=settings.leave_grace_s),
        tokenizers=PoolTarget(
            tokenizers, partial(TokenizerInstance, identity=identity, limits=limits, rng=rng)
        ),
        detokenizers=PoolTarget(
            detokenizers, partial(DetokenizerInstance, identity=identity, limits=limits, rng=rng)
        ),
    )
    discovery = discovery_of(settings, targets, rng)
    admission = _admission(settings, metrics)
    pipeline = Pipeline(
        fleet,
        texts=Texts(
            Tokenizers(tokenizers, wait_s=settings.ready_wait_s, try_s=settings.text_timeout_s),
            Detokenizers(detokenizers),
        ),
        admit=admission.admit,
        pace=pace_of(settings),
        rng=rng,
        on_loss=lambda service, reason: metrics.output_losses.labels(service, reason).inc(),
    )
    links: dict[str, Links] = {
        "worker": fleet.groups,
        "tokenizer": tokenizers,
        "detokenizer": detokenizers,
    }
    watch(metrics, admission=admission, fleet=fleet, links=links)
    return Core(
        metrics=metrics,
        fleet=fleet,
        tokenizers=tokenizers,
        detokenizers=detokenizers,
        admission=admission,
        pipeline=pipeline,
        discovery=discovery,
        readiness=Readiness(discovery, fleet.groups, [tokenizers, detokenizers]),
    )


def _judges(settings: RouterSettings, meters: Meters) -> Judges:
    return Judges(
        BreakerLimits(failures=settings.breaker_failures, open_s=settings.breaker_open_s),
        OutlierLimits(ratio=settings.outlier_ratio),
        on_turn=meters.turned,
    )


def _admission(settings: RouterSettings, metrics: RouterMetrics) -> Admission:
    def refused(reason: str, cause: str) -> None:
        metrics.refusals.labels(reason, cause).inc()

    return Admission(
        max_concurrent=settings.max_concurrent,
        max_queued=settings.max_queued,
        queue_timeout_s=settings.queue_timeout_s,
        tokens=TokenLimits(
            max_concurrent=settings.max_concurrent_tokens, max_queued=settings.max_queued_tokens
        ),
        tenants=_tenants(settings),
        told=Told(admitted=metrics.queue_seconds.observe, refused=refused),
    )


def _tenants(settings: RouterSettings) -> Tenants:
    default = Rate(
        tokens=settings.tenant_tokens_per_minute, requests=settings.tenant_requests_per_minute
    )

    def rate(own: TenantLimits) -> Rate:
        tokens, requests = own.tokens_per_minute, own.requests_per_minute
        return Rate(
            tokens=default.tokens if tokens is None else tokens,
            requests=default.requests if requests is None else requests,
        )

    return Tenants(
        default=default,
        own={name: rate(own) for name, own in settings.tenant_limits.items()},
        remembered=settings.max_tenants,
    )


def _index(settings: RouterSettings, metrics: RouterMetrics) -> Index:
    evicted = metrics.tree_evicted_blocks.inc
    tree = MetaTree(budget_bytes=settings.index_bytes, on_evicted=evicted)
    return Index(tree, meters=Meters(metrics))


def policy_of(settings: RouterSettings) -> Policy:
    """Return the policy by its name, with what can be set of it."""
    if settings.policy == CacheAware.name:
        return CacheAware(
            threshold=settings.cache_threshold,
            balance_abs=settings.balance_abs_threshold,
            balance_rel=settings.balance_rel_threshold,
        )
    return POLICIES[settings.policy]()


def pace_of(settings: RouterSettings) -> Pace:
    """Return the times and defaults of the pipeline."""
    return Pace(
        request_timeout_s=settings.request_timeout_s,
        ready_wait_s=settings.ready_wait_s,
        text_wait_s=settings.ready_wait_s,
        resume_wait_s=settings.resume_wait_s,
        attempt_timeout_s=settings.attempt_timeout_s,
        text_timeout_s=settings.text_timeout_s,
        stream_interval_s=settings.stream_interval_ms / 1000,
        max_pending_bytes=settings.client_buffer_bytes,
        default_max_tokens=settings.default_max_tokens,
    )


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
