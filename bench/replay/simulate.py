"""Puts clock, workers and routers together and runs a scenario once. Same seed, same result."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from bench.replay.clock import Clock
from bench.replay.job import Job, ReplayError, Scenario, prefill_rate
from bench.replay.outcome import Outcome, Served
from bench.replay.router import Booked, Chooser, Links, Router
from bench.replay.worker import Entry, Pace, Worker
from router.fleet.changes import Change, Chunk
from router.policy.price import SHAPE, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a run is made with, beside scenario and policy. 0 means what the scenario says.

    Attributes:
        replicas: Workers.
        load: Share of the prefill capacity that is needed with an endless shared cache.
        routers: Each request goes to one of them by chance.
        cache_tokens: Ids of a worker's cache.
        serial: Whether workers are of the prefill-only model.
        budget: Ids of a step.
        seed: Of all chance.
        shape: Constants of the price.
    """

    replicas: int = 0
    load: float = 0.0
    routers: int = 1
    cache_tokens: int = 0
    serial: bool = False
    budget: int = 512
    links: Links = field(default_factory=Links)
    seed: int = 1
    shape: Shape = SHAPE


class Replay:
    """One run of a scenario under one policy."""

    def __init__(
        self, scenario: Scenario, setup: Setup, make_chooser: Callable[[], Chooser]
    ) -> None:
        if not scenario.jobs:
            raise ReplayError("there are no requests")
        if setup.routers < 1:
            raise ReplayError("there must be a router")
        self.scenario = scenario
        self._clock = Clock()
        self._rng = Random(setup.seed)
        self._links = setup.links
        self._sequences: list[int] = []
        self.routers: list[Router] = []
        self.workers = [
            self._worker(number, pace) for number, pace in enumerate(paces(scenario, setup))
        ]
        for _ in range(setup.routers):
            rng = Random(self._rng.random())
            self.routers.append(
                Router(self.workers, make_chooser(), setup.links, rng=rng, shape=setup.shape)
            )
        self._served: list[Served] = []

    def _worker(self, number: int, pace: Pace) -> Worker:
        self._sequences.append(0)
        return Worker(self._clock, pace, partial(self._publish, number))

    def _publish(self, number: int, change: Change) -> None:
        self._sequences[number] += 1
        for router in self.routers:
            router.send(self._clock.now, number, self._sequences[number], change)

    def _snapshots(self, router: Router) -> None:
        for number in router.snapshots_wanted():
            pairs = list(self.workers[number].cache.pairs())
            keys, parents = [key for key, _ in pairs], [parent for _, parent in pairs]
            chunk = Chunk(self._sequences[number], keys, parents, first=True, last=True)
            router.send(self._clock.now, number, self._sequences[number], chunk)

    def run(self) -> Outcome:
        """Serve all requests and say how it went."""
        for router in self.routers:
            self._snapshots(router)
        for job in self.scenario.jobs:
            self._clock.at(job.at, partial(self._arrive, job))
        self._clock.run()
        return Outcome(
            block_tokens=self.scenario.block_tokens,
            served=self._served,
            busy_s=[worker.busy_s for worker in self.workers],
            end_s=self._clock.now,
        )

    def _arrive(self, job: Job) -> None:
        router = self._rng.choice(self.routers)
        booked = router.choose(job, self._clock.now)
        self._snapshots(router)
        served = Served(job=job, worker=booked.worker, predicted_blocks=booked.predicted_blocks)
        self._served.append(served)
        entry = Entry(job, lambda: None, partial(self._end, router, booked))
        entry.on_first = partial(self._first, served, entry)
        worker = self.workers[booked.worker]
        self._clock.at(self._clock.now + self._links.hop_s, partial(worker.submit, entry))

    def _first(self, served: Served, entry: Entry) -> None:
        served.first_s = self._clock.now - served.job.at
        served.computed = entry.computed

    def _end(self, router: Router, booked: Booked) -> None:
        router.ended(self._clock.now, booked)


def paces(scenario: Scenario, setup: Setup) -> list[Pace]:
    """Return the pace of each worker.

    Raises:
        ReplayError: There is none, or nothing fits into its cache.
    """
    replicas = setup.replicas or scenario.replicas
    blocks = (setup.cache_tokens or scenario.cache_tokens) // scenario.block_tokens
    if replicas < 1 or blocks < 1 or setup.budget < 1:
        raise ReplayError("there must be replicas, with a cache of a block and a step of an id")
    rate = prefill_rate(scenario, load=setup.load or scenario.load, replicas=replicas)
    usual = Pace(
        rate=rate,
        cache_blocks=blocks,
        block_tokens=scenario.block_tokens,
        serial=setup.serial,
        budget=setup.budget,
    )
    speeds = [scenario.speed(number) for number in range(replicas)]
    return [
        replace(usual, rate=rate * speed, floor_s=usual.floor_s / speed, row_s=usual.row_s / speed)
        for speed in speeds
    ]
