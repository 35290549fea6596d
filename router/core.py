"""The router without its edges: constructed and connected from its settings. Starts nothing.

The composition root; `router/app.py` puts the edges around it and runs it.
"""

import asyncio
import random
import uuid
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from radixmesh.errors import MeshError
from radixmesh.rpc.link import Identity, LinkLimits
from radixmesh.telemetry.metrics import RouterMetrics
from router.discovery.discovery import Discovery
from router.discovery.targets import GroupTarget, PoolTarget
from router.edge.admission import Admission, TokenLimits
from router.edge.permit import Told
from router.edge.tenants import Rate, Tenants
from router.fleet.breaker import BreakerLimits
from router.fleet.feed import Index
from router.fleet.fitness import Judges
from router.fleet.meters import Meters
from router.fleet.outliers import OutlierLimits
from router.fleet.registry import Fleet
from router.fleet.worker_link import GroupEvents, WorkerLink
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


@dataclass(frozen=True, slots=True)
class _Dialler:
    """Makes links, all of them with this router's identity."""

    identity: Identity
    limits: LinkLimits
    rng: random.Random

    def group(self, address: str, events: GroupEvents) -> WorkerLink:
        return WorkerLink(address, events, identity=self.identity, limits=self.limits, rng=self.rng)

    def tokenizer(self, address: str) -> TokenizerInstance:
        return TokenizerInstance(address, identity=self.identity, limits=self.limits, rng=self.rng)

    def detokenizer(self, address: str) -> DetokenizerInstance:
        return DetokenizerInstance(
            address, identity=self.identity, limits=self.limits, rng=self.rng
        )


def build(settings: RouterSettings, *, limits: LinkLimits | None = None) -> Core:
    """Construct the router without its edges; nothing is started.

    Args:
        settings: The flags.
        limits: Bounds and intervals of links.
    """
    metrics, rng = RouterMetrics(CollectorRegistry()), random.Random()
    dialler = _Dialler(Identity("router", uuid.uuid4().hex), limits or LinkLimits(), rng)
    fleet = _fleet(settings, metrics, dialler)
    lost = metrics.links_lost.labels
    tokenizers = Pool[TokenizerInstance]("tokenizer", rng=rng, on_lost=lost("tokenizer").inc)
    detokenizers = Pool[DetokenizerInstance](
        "detokenizer", rng=rng, on_lost=lost("detokenizer").inc
    )
    targets = Targets(
        groups=GroupTarget(fleet, drain_s=settings.leave_grace_s),
        tokenizers=PoolTarget(tokenizers, dialler.tokenizer),
        detokenizers=PoolTarget(detokenizers, dialler.detokenizer),
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


def _fleet(settings: RouterSettings, metrics: RouterMetrics, dialler: _Dialler) -> Fleet:
    index = _index(settings, metrics)
    return Fleet(
        policy=policy_of(settings),
        connect=dialler.group,
        index=index,
        judges=_judges(settings, index.meters),
        rng=dialler.rng,
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
