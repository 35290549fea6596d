"""One router of a replay: the real meta-tree, feeds, loads, board and policy on modelled links.

A frame from a worker takes `feed_delay_s`, one to it `hop_s`. Load reports are what the
protocol sends: absolute, every 50 ms to a router that has work there and every 200 ms to the
others, with the last entry of that router that they include. The router looks at what has
come only when it has a choice to make, which shows it the same as if it had looked at once.
Approximated: a lost change is noticed, and a snapshot asked for, at the next choice.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from bench.replay.job import Job, reusable_blocks
from bench.replay.worker import Load, Worker
from router.fleet.changes import Change, Chunk, Stored
from router.fleet.feed import Feed, Index
from router.fleet.workload import Charge, Report, Workload
from router.policy.board import Board
from router.policy.choice import Ints, Prices, Standing, View, Wish
from router.policy.price import SHAPE, Shape
from router.tree.marks import Marks
from router.tree.meta_tree import FeedBroken
from router.tree.predicted import Predicted

BUSY_PERIOD_S = 0.05
OTHERS_PERIOD_S = 0.2
OUTPUT_LIMIT = 1024


class Chooser(Protocol):
    """A policy as a replay sees it: it may look at the keys too."""

    def pick(self, job: Job, prices: Prices, rows: Ints, wish: Wish, rng: Random) -> int:
        """Return one of the rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What lies between routers and workers.

    Attributes:
        hop_s: Seconds that a request takes to a worker.
        feed_delay_s: Seconds that anything takes from a worker to a router.
        feed_loss: Chance that a change of a cache is lost.
        repair: Whether sequence numbers are looked at: a gap brings a new snapshot.
    """

    hop_s: float = 0.001
    feed_delay_s: float = 0.005
    feed_loss: float = 0.0
    repair: bool = True


@dataclass(slots=True, eq=False)
class Booked:
    """A choice: the worker's index, and what it counts for until it ends."""

    worker: int
    charge: Charge
    marks: Marks
    predicted_blocks: int


class Seat:
    """One worker as a router sees it."""

    def __init__(self, number: int, worker: Worker, index: Index, links: Links) -> None:
        self.worker = worker
        self.workload = Workload()
        self.workload.kv_blocks = worker.pace.cache_blocks
        self.predicted = Predicted()
        self.bookings: dict[Booked, Sequence[int]] = {}
        self.arrivals: deque[tuple[float, int]] = deque()
        self.asked = True  # a snapshot is on its way or wanted
        self.feed = Feed(index, ask=self._ask, on_lost=self._guess, name=str(number))
        self.feed.begin(0.0)
        self._index = index
        self._repair = links.repair
        self._delay_s = links.feed_delay_s
        self._seen = 0
        self._at = 0
        self._reported = -1.0

    def _ask(self) -> None:
        self.asked = True

    def _guess(self, now: float) -> None:
        for keys in self.bookings.values():
            self.predicted.learn(keys, now)

    def hear(self, sequence: int, change: Change | Chunk, now: float) -> None:
        """A frame of the feed came."""
        if isinstance(change, Chunk):
            self.feed.on_chunk(change, now)
        elif self._repair:
            self.feed.on_change(sequence, change, now)
        else:
            self._trust(change)

    def _trust(self, change: Change) -> None:
        """Apply a change as routers do that look for no gaps: pass over what doesn't fit."""
        tree, number = self._index.tree, self.feed.number
        try:
            if isinstance(change, Stored):
                tree.store(number, change.parent, change.keys)
            else:
                tree.remove(number, change.keys)
        except FeedBroken:
            return

    def refresh(self, now: float) -> None:
        """Take the last load report that has come by now."""
        period = BUSY_PERIOD_S if self.bookings else OTHERS_PERIOD_S
        sent = math.floor((now - self._delay_s) / period) * period
        if sent <= self._reported:
            return
        self._reported = sent
        while self.arrivals and self.arrivals[0][0] <= sent:
            self._seen = self.arrivals.popleft()[1]
        self.workload.report(self._report(sent), now)

    def _report(self, sent: float) -> Report:
        loads = self.worker.loads
        while self._at + 1 < len(loads) and loads[self._at + 1].since <= sent:
            self._at += 1
        load: Load = loads[self._at]
        return Report(
            running=load.running,
            waiting=load.waiting,
            uncached_tokens=max(0, int(load.uncached - load.pace * (sent - load.since))),
            free_blocks=load.free_blocks,
            prefill_rate=load.prefill_rate,
            decode_step_s=load.decode_step_s,
            seen_entry_id=self._seen,
        )

    def standing(self, now: float) -> Standing:
        """Return how it stands, by what this router knows."""
        load, pace = self.workload.at(now), self.worker.pace
        return Standing(
            view=self.feed.view,
            block_tokens=pace.block_tokens,
            running=load.running,
            waiting=load.waiting,
            uncached_tokens=load.uncached_tokens,
            free_blocks=load.free_blocks,
            cached_blocks=self.feed.block_count,
            kv_blocks=pace.cache_blocks,
            max_running=pace.max_running,
            step_tokens=pace.budget,
            prefill_rate=load.prefill_rate,
            decode_step_s=load.decode_step_s,
        )

    def matched(self, keys: Sequence[int], held: int, now: float) -> int:
        """Leading blocks that it holds; `held` by the tree, which is only trusted while exact."""
        view = self.feed.view if self._repair else View.EXACT
        if view is View.DEGRADED:
            return self.predicted.depth(keys, now)
        return held if view is View.EXACT else 0


class Router:
    """Chooses a worker for each job that comes to it."""

    def __init__(
        self,
        workers: Sequence[Worker],
        chooser: Chooser,
        links: Links,
        *,
        rng: Random,
        shape: Shape = SHAPE,
    ) -> None:
        self._chooser = chooser
        self._links = links
        self._rng = rng
        self._index = Index()
        self._board = Board(shape)
        self._seats = [
            Seat(number, worker, self._index, links) for number, worker in enumerate(workers)
        ]
        self._rows = [self._board.add((f"w{number:03}", 0)) for number in range(len(workers))]
        self._inbox: deque[tuple[float, Callable[[float], None]]] = deque()
        self._entries = 0

    def send(self, now: float, worker: int, sequence: int, change: Change | Chunk) -> None:
        """A worker sends a change of its cache, or a part of a snapshot."""
        lossy = self._links.feed_loss and not isinstance(change, Chunk)
        if lossy and self._rng.random() < self._links.feed_loss:
            return
        seat = self._seats[worker]
        self._post(now, lambda at: seat.hear(sequence, change, at))

    def snapshots_wanted(self) -> list[int]:
        """Return the workers from which a snapshot is wanted, once."""
        wanted = [number for number, seat in enumerate(self._seats) if seat.asked]
        for number in wanted:
            self._seats[number].asked = False
        return wanted

    def ended(self, now: float, booked: Booked) -> None:
        """A worker says that an entry has ended."""
        self._post(now, lambda _: self._release(booked))

    def _post(self, now: float, action: Callable[[float], None]) -> None:
        self._inbox.append((now + self._links.feed_delay_s, action))

    def _release(self, booked: Booked) -> None:
        seat = self._seats[booked.worker]
        booked.marks.release()
        seat.workload.release(booked.charge)
        del seat.bookings[booked]

    def _catch_up(self, now: float) -> None:
        while self._inbox and self._inbox[0][0] <= now:
            at, action = self._inbox.popleft()
            action(at)
        for seat, row in zip(self._seats, self._rows, strict=True):
            if self._links.repair and seat.feed.view is not View.EXACT:
                seat.feed.tick(now)
            seat.refresh(now)
            row.set(seat.standing(now))

    def choose(self, job: Job, now: float) -> Booked:
        """Choose a worker and book the job there."""
        self._catch_up(now)
        limit = reusable_blocks(job, self._seats[0].worker.pace.block_tokens)
        held, soon = self._index.tree.reach(job.keys)
        matched = []
        for seat in self._seats:
            number = seat.feed.number
            depth = seat.matched(job.keys, held.get(number, 0), now)
            matched.append(min(limit, max(depth, soon.get(number, 0))))
        # How long the output will be nobody knows: the limit is all that a request says.
        limit_tokens = max(OUTPUT_LIMIT, job.output)
        wish = Wish(prompt_tokens=job.tokens, max_tokens=limit_tokens, session=job.session)
        prices = self._board.price(matched, wish)
        rows = np.flatnonzero(prices.eligible)
        chosen = self._chooser.pick(job, prices, rows, wish, self._rng)
        return self._book(job, chosen, matched[chosen], now)

    def _book(self, job: Job, number: int, matched: int, now: float) -> Booked:
        seat = self._seats[number]
        tokens = job.tokens - matched * seat.worker.pace.block_tokens
        blocks = math.ceil(tokens / seat.worker.pace.block_tokens)
        self._entries += 1
        charge = Charge(tokens=tokens, blocks=blocks, entry_ids=[self._entries])
        marks = self._index.tree.mark(seat.feed.number, job.keys)
        booked = Booked(number, charge, marks, matched)
        seat.workload.book(charge)
        seat.bookings[booked] = job.keys
        seat.arrivals.append((now + self._links.hop_s, self._entries))
        if seat.feed.view is View.DEGRADED:
            seat.predicted.learn(job.keys, now)
        return booked

    def proof(self) -> list[set[int]]:
        """Return the keys that the tree has of each worker, when all that was sent has come."""
        while self._inbox:
            at, action = self._inbox.popleft()
            action(at)
        return [self._index.tree.keys_of(seat.feed.number) for seat in self._seats]
