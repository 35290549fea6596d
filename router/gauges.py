"""Gauges of the router's state, refreshed now and then. Reads everything; changes nothing."""

from collections import Counter

from radixmesh.telemetry.metrics import RouterMetrics
from router.edge.admission import Admission
from router.fleet.registry import Fleet
from router.fleet.views import Phase
from router.policy.choice import View
from router.text.detokenizers import Detokenizers
from router.text.tokenizers import Tokenizers


class Gauges:
    """Keeps the gauges true."""

    def __init__(
        self,
        metrics: RouterMetrics,
        fleet: Fleet,
        admission: Admission,
        tokenizers: Tokenizers,
        detokenizers: Detokenizers,
    ) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._texts: dict[str, Tokenizers | Detokenizers] = {
            "tokenizer": tokenizers,
            "detokenizer": detokenizers,
        }
        # Numbers that any thread may read: true at the moment of the scrape.
        metrics.in_flight.set_function(lambda: admission.running)
        metrics.queued.set_function(lambda: admission.queued)

    def refresh(self) -> None:
        """Look at everything else; called on the event loop."""
        replicas = self._fleet.replicas()
        counts = Counter((replica.phase, replica.view) for replica in replicas)
        for phase in Phase:
            for view in View:
                gauge = self._metrics.replicas.labels(phase.name.lower(), view.name.lower())
                gauge.set(counts[phase, view])
        self._metrics.tree_blocks.set(len(self._fleet.tree))
        for service, pool in self._texts.items():
            self._metrics.links_up.labels(service).set(pool.connected)
            self._metrics.link_entries.labels(service).set(pool.entries)
        up = {one.group_id for one in replicas if one.phase is not Phase.CONNECTING}
        self._metrics.links_up.labels("worker").set(len(up))
        in_flight = sum(replica.in_flight for replica in replicas)
        self._metrics.link_entries.labels("worker").set(in_flight)
