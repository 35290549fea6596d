"""Metrics pages as people scrape them, and what a service declares for its own."""

import asyncio
import urllib.request
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families


class Page:
    """One scrape: the sum of each family's samples, over all labels; histograms by their counts."""

    def __init__(self, text: str) -> None:
        self.gauges: dict[str, float] = {}
        self.counts: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            # When something was first counted is a family of its own.
            if family.name.startswith("radixmesh_") and not family.name.endswith("_created"):
                kind = self.gauges if family.type == "gauge" else self.counts
                kind[family.name] = sum(sample.value for sample in family.samples)

    @property
    def unmoved(self) -> set[str]:
        """Counters and histograms that nothing was counted in."""
        return {name for name, value in self.counts.items() if not value}

    @property
    def held(self) -> set[str]:
        """Gauges that are not zero."""
        return {name for name, value in self.gauges.items() if value}


async def page(port: int) -> Page:
    """Scrape the page at a port of this machine."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    return Page(await asyncio.to_thread(read))


def declared(make: Callable[[CollectorRegistry], Any]) -> set[str]:
    """The families that a service's metrics class declares."""
    registry = CollectorRegistry()
    make(registry)
    return {family.name for family in registry.collect()}
