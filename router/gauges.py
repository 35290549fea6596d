"""Gauges of the router's state, read when they are scraped. Reads everything; changes nothing.

Readers run on the thread of the metrics page, too, so they take copies of what the
event loop may change under them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from radixmesh.telemetry.metrics import RouterMetrics
from router.edge.admission import Admission
from router.edge.places import BANDS
from router.fleet.fitness import Stance
from router.fleet.registry import Fleet
from router.fleet.views import Phase
from router.policy.choice import View


class Links(Protocol):
    """The links to all processes of one service."""

    @property
    def connected(self) -> int:
        """How many are up."""
        ...

    @property
    def entries(self) -> int:
        """Entries that are open on them."""
        ...

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes."""
        ...


def watch(
    metrics: RouterMetrics, *, admission: Admission, fleet: Fleet, links: Mapping[str, Links]
) -> None:
    """Read the gauges from these whenever they are scraped; `links` by service."""
    metrics.in_flight.set_function(lambda: admission.running)
    for band in BANDS:
        metrics.queued.labels(band).set_function(partial(_queued, admission, band))
    metrics.held_tokens.set_function(lambda: admission.tokens)
    metrics.queued_tokens.set_function(lambda: admission.queued_tokens)
    metrics.tenants.set_function(lambda: admission.tenants)
    metrics.tree_blocks.set_function(lambda: len(fleet.tree))
    for stance in Stance:
        gauge = metrics.standings.labels(stance.value)
        gauge.set_function(partial(fleet.count_stances, stance))
    for phase in Phase:
        for view in View:
            gauge = metrics.replicas.labels(phase.name.lower(), view.name.lower())
            gauge.set_function(partial(fleet.count, phase, view))
    for service, those in links.items():
        _watch_links(metrics, service, those)


def _queued(admission: Admission, band: str) -> int:
    return admission.queued_by_band[band]


def _watch_links(metrics: RouterMetrics, service: str, links: Links) -> None:
    metrics.links_up.labels(service).set_function(lambda: links.connected)
    metrics.link_entries.labels(service).set_function(lambda: links.entries)
    metrics.link_pending_bytes.labels(service).set_function(lambda: links.pending_bytes)
