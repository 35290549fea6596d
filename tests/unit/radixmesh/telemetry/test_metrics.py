"""Metrics: names follow the rule, labels are few and ours, the page is served."""

import re
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from radixmesh.telemetry.metrics import (
    MetricsServer,
    RouterMetrics,
    TextMetrics,
    WorkerMetrics,
    serve_metrics,
)

UNITS = ("seconds", "bytes", "tokens", "blocks", "count", "second")
LABELS = {"edge", "outcome", "service", "reason", "phase", "view", "policy", "kind", "cause"} | {
    "dp_rank",
    "priority",
    "standing",
}


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    WorkerMetrics(registry)
    TextMetrics(registry, "tokenizer")
    TextMetrics(registry, "detokenizer")
    return registry


def test_names_say_service_noun_and_unit(registry: CollectorRegistry) -> None:
    families = list(registry.collect())
    assert len(families) > 50
    for family in families:
        assert re.fullmatch(r"radixmesh_(router|worker|tokenizer|detokenizer)_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
        # A counter's unit may be what it counts: requests, steps, restarts.
        assert family.type == "counter" or family.name.endswith(UNITS), family.name


def test_labels_come_from_our_own_words(registry: CollectorRegistry) -> None:
    used = {
        label
        for collector in registry._names_to_collectors.values()
        for label in getattr(collector, "_labelnames", ())
    }
    assert used <= LABELS


def test_two_sets_of_metrics_in_one_process_do_not_meet() -> None:
    first, second = CollectorRegistry(), CollectorRegistry()
    RouterMetrics(first).view_losses.labels("gap").inc()
    RouterMetrics(second)
    name = "radixmesh_router_view_losses_total"
    assert first.get_sample_value(name, {"cause": "gap"}) == 1
    assert second.get_sample_value(name, {"cause": "gap"}) is None


def test_the_page_is_served_and_goes_away() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry).in_flight.set(3)
    server = MetricsServer(0, registry)
    url = f"http://127.0.0.1:{server.port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as response:
        page = response.read().decode()
    server.close()
    assert "radixmesh_router_requests_in_flight_count 3.0" in page
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=5)


@pytest.mark.parametrize("port", [0, None])
def test_no_port_means_no_page(port: int | None) -> None:
    assert serve_metrics(port, CollectorRegistry()) is None
