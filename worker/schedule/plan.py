"""One step's rows: decode first, then prefills in chunks. Pure.

Steps may be under way while the next one is planned. Chunks of one prefill follow each
other through them. Who waits for an id that is still being drawn is left out, unless
ids may be futures: then its row says which draw of the step before it goes on from.
Without futures the decoding requests are spread over all steps that may be under way,
so that each of them has its part.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from worker.engine.engine import Row
from worker.schedule.rows import row_of
from worker.schedule.running import chain_of
from worker.schedule.sequence import Sequence


@dataclass(slots=True)
class Flight:
    """A step from its plan to its commit: whose rows it has, and of which residence each is."""

    step: int
    owners: list[tuple[Sequence, int]] = field(default_factory=list)
    draws: int = 0

    def add(self, sequence: Sequence, row: Row) -> None:
        """Note that the row is under way."""
        self.owners.append((sequence, sequence.residence))
        sequence.planned += len(row.ids)
        if row.sampled:
            sequence.pending += 1
            sequence.drawn_in = self.step
            sequence.draw_index = self.draws
            self.draws += 1


def plan_rows(
    running: Iterable[Sequence],
    flight: Flight,
    *,
    budget: int,
    spread: int,
    free: int,
    before: Flight | None,
) -> tuple[Row, ...]:
    """Choose what the next step computes, at most `budget` ids, and put it into `flight`.

    `spread` is over how many steps the decoding requests are spread, and `free` how many
    of those are not under way. `before` is the step whose draws may be futures: the one
    launched last, if it is still under way; None where ids must be known.
    """
    decoding: list[Sequence] = []
    prefilling: list[Sequence] = []
    for one in running:
        (decoding if one.remaining == 1 else prefilling).append(one)
    rows: list[Row] = []
    for one in _share(decoding, spread, free, before):
        future = one.draw_index if one.pending else -1
        row = row_of(one, chain_of(one), 1, future=future)
        flight.add(one, row)
        rows.append(row)
    budget -= len(rows)
    for one in prefilling:
        if budget <= 0:
            break
        row = row_of(one, chain_of(one), min(one.remaining, budget))
        flight.add(one, row)
        budget -= len(row.ids)
        rows.append(row)
    return tuple(rows)


def _share(
    decoding: list[Sequence], spread: int, free: int, before: Flight | None
) -> list[Sequence]:
    if before is not None:
        step = before.step
        return [
            one
            for one in decoding
            if not one.pending or (one.pending == 1 and one.drawn_in == step and one.goes_on)
        ]
    ready = [one for one in decoding if not one.pending]
    # The second bound evens out what came about unevenly. Nobody is left out for long: as
    # many steps as may be under way have room for all, and have each but once.
    return ready[: min(-(-len(ready) // free), -(-len(decoding) // spread))]
