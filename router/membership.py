"""What lists the members of this router's fleet, built from its settings. Runs nothing."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from router.discovery.discovery import Discovery, Subscription
from router.discovery.file import FileSource
from router.discovery.lookup import Lookup, Wanted
from router.discovery.member import Source, parse_member
from router.discovery.reconcile import Reconciler, Target
from router.settings import RouterSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Where members join."""

    groups: Target[Any]
    tokenizers: Target[Any]
    detokenizers: Target[Any]


def discovery_of(settings: RouterSettings, targets: Targets, rng: random.Random) -> Discovery:
    """Return all sources that the settings name; those whom flags name have joined already.

    Args:
        settings: The flags.
        targets: Where members join.
        rng: Jitter of intervals.

    Raises:
        ModuleNotFoundError: A source needs an extra that is not installed.
    """
    subscriptions: list[Subscription] = []
    for section, target, flags in (
        ("groups", targets.groups, settings.groups),
        ("tokenizers", targets.tokenizers, settings.tokenizers),
        ("detokenizers", targets.detokenizers, settings.detokenizers),
    ):
        reconciler: Reconciler[Any] = Reconciler(target)
        reconciler.publish("flags", [parse_member(flag) for flag in flags])
        sources = _sources(settings, section, rng)
        subscriptions.extend(Subscription(source, reconciler) for source in sources)
    return Discovery(subscriptions)


def _sources(settings: RouterSettings, section: str, rng: random.Random) -> Iterator[Source]:
    if settings.members_file is not None:
        yield FileSource(settings.members_file, section)
    yield from _names(settings, getattr(settings, f"{section}_dns"), rng)
    service: str = getattr(settings, f"{section}_service")
    namespace, port = settings.kubernetes_namespace, settings.kubernetes_port
    if service:
        yield _slices(settings, Wanted.service(service, namespace=namespace, port=port), rng)
    elif section == "groups" and settings.groups_selector:
        wanted = Wanted(selector=settings.groups_selector, namespace=namespace, port=port)
        yield _slices(settings, wanted, rng)


def _names(settings: RouterSettings, names: Sequence[str], rng: random.Random) -> Iterator[Source]:
    if not names:
        return
    # Only here: others need not load it.
    from router.discovery.dns import DnsSource

    for name in names:
        yield DnsSource(Lookup.parse(name), interval_s=settings.dns_interval_s, rng=rng)


def _slices(settings: RouterSettings, wanted: Wanted, rng: random.Random) -> Source:
    # Only here: the `kubernetes` extra may not be installed.
    from router.discovery.kubernetes import Api, KubernetesSource

    api = Api(settings.kubernetes_api)
    return KubernetesSource(wanted, api=api, resync_s=settings.kubernetes_resync_s, rng=rng)
