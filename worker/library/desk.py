"""Gives runs to a group, no faster than it takes them, and begins lost ones anew.

Lives on the event loop of the group, whose only user it is; nothing here waits. A run
whose replica dies goes on elsewhere from its journal. One that is lost twice without a new
id is suspected and goes alone; lost once more, it is given up as poisoned.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import (
    Cancelled,
    Draining,
    GroupLost,
    InternalError,
    MeshError,
    NoReplicaReady,
    QueueFull,
    RankDesync,
    RequestPoisoned,
)
from worker.front.group import Group
from worker.front.jobs import StepPart
from worker.front.replica import ReplicaState
from worker.library.run import SUSPECT_LOSSES, Delta, Run, tops_of
from worker.request import GOES_ON

_MAX_LOSSES: Final = SUSPECT_LOSSES + 1


class Desk:
    """Owner of all jobs of a library's group."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._entry_ids = itertools.count(1)
        self._pending: deque[Run] = deque()
        self._again: list[Run] = []  # go before all that is pending, in this order
        self._running: dict[int, Run] = {}
        self._alone: Run | None = None  # a suspect that runs
        self._ended: MeshError | None = None
        self._stalled = False  # nothing is taken until something changes
        self._feeding = False

    def __repr__(self) -> str:
        return f"Desk({len(self._pending)} pending, {len(self._running)} running)"

    def begin(self, runs: Iterable[Run]) -> None:
        """Take runs, in order. Each is told its end, whatever happens."""
        for run in runs:
            if run.error is not None:
                run.on_end(run)
            elif self._ended is not None:
                self._end(run, self._ended)
            else:
                self._pending.append(run)
        self._feed_soon()

    def cancel(self, runs: Iterable[Run]) -> None:
        """Give up runs; those that are over are left as they are."""
        dropped = {run for run in runs if not run.over}
        if not dropped:
            return
        self._pending = deque(run for run in self._pending if run not in dropped)
        self._again = [run for run in self._again if run not in dropped]
        self._running = {at: run for at, run in self._running.items() if run not in dropped}
        if self._alone in dropped:
            self._alone = None
        self._group.cancel([run.job for run in dropped if run.job is not None])
        for run in dropped:
            self._end(run, Cancelled("the run was cancelled"))
        self._feed_soon()

    def end(self, error: MeshError) -> None:
        """End every run, and those that are still to come, with an error."""
        self._ended = error
        left = [*self._running.values(), *self._again, *self._pending]
        for held in (self._running, self._again, self._pending):
            held.clear()
        self._group.cancel([run.job for run in left if run.job is not None], "stopped")
        for run in left:
            self._end(run, error)

    def on_change(self) -> None:
        """A replica's state changed."""
        self._stalled = False
        self._feed_soon()

    # Owner: what the group says.

    def on_step(self, dp_rank: int, part: StepPart) -> None:
        """Take a step's part."""
        del dp_rank
        for started in part.started:
            run = self._running.get(started.request_id)
            if run is not None and run.cached_tokens is None:
                run.cached_tokens = started.cached_tokens
        for scores in part.prompt_scores:
            run = self._running.get(scores.request_id)
            if run is not None:
                run.take_scores(scores.position, scores.logprobs, tops_of(scores.tops))
        for entry_id, delta in _deltas(part):
            run = self._running.get(entry_id)
            if run is not None:
                self._take(entry_id, run, delta)
        self._stalled = False
        self._feed_soon()

    def on_failed(self, entry_id: int, error: MeshError) -> None:
        """Take a failure: begin again what was lost or found no place, end the rest."""
        run = self._running.get(entry_id)
        if run is None:
            return
        self._leave(entry_id, run)
        if isinstance(error, QueueFull | Draining):
            run.job = None
            self._stalled = True
            self._again.append(run)
        elif isinstance(error, GroupLost | RankDesync):
            self._lost(run, error)
        else:
            self._end(run, error)
        self._feed_soon()

    def on_seen(self, dp_rank: int, entry_id: int) -> None:
        """Nothing to learn: nobody here is told of load."""

    # Within.

    def _take(self, entry_id: int, run: Run, delta: Delta) -> None:
        try:
            run.take(delta)
        except ValueError as fault:
            if run.job is not None:
                self._group.cancel([run.job], "broken")
            self._leave(entry_id, run)
            self._end(run, InternalError(str(fault)))
            return
        if delta.finish != GOES_ON:
            self._leave(entry_id, run)
            run.on_end(run)

    def _lost(self, run: Run, error: MeshError) -> None:
        run.lose()
        if run.losses >= _MAX_LOSSES:
            poisoned = RequestPoisoned(f"its replica died {run.losses} times: {error.message}")
            self._end(run, poisoned)
        else:
            self._again.append(run)

    def _leave(self, entry_id: int, run: Run) -> None:
        del self._running[entry_id]
        if self._alone is run:
            self._alone = None

    def _end(self, run: Run, error: MeshError) -> None:
        run.error = error
        run.on_end(run)

    def _feed_soon(self) -> None:
        # Once for all that happens in a step, and never inside the group's own loops.
        if (self._pending or self._again) and not self._feeding:
            self._feeding = True
            self._loop.call_soon(self._feed)

    def _feed(self) -> None:
        self._feeding = False
        self._pending.extendleft(reversed(self._again))
        self._again.clear()
        room = self._room() - len(self._running)
        while self._pending and not self._stalled and self._may_start(self._pending[0], room):
            room -= 1
            self._start(self._pending.popleft())

    def _room(self) -> int:
        replicas = self._group.replicas
        up = sum(replica.state is ReplicaState.UP for replica in replicas)
        info = self._group.info
        waiting = info.max_waiting
        if len(replicas) > 1:
            # What waits at a replica can't go to another that is done earlier.
            waiting = min(waiting, info.max_running)
        return up * (info.max_running + waiting)

    def _may_start(self, run: Run, room: int) -> bool:
        if self._alone is not None:
            return False
        return not self._running if run.suspect else room > 0

    def _start(self, run: Run) -> None:
        entry_id = next(self._entry_ids)
        try:
            run.job = self._group.submit(self, entry_id, run.ask(self._place(run)))
        except (NoReplicaReady, QueueFull, GroupLost, Draining):
            # Nobody is there, or reads, or the group is paused: that changes.
            self._stalled = True
            self._pending.appendleft(run)
        except MeshError as error:
            self._end(run, error)
        else:
            self._running[entry_id] = run
            if run.suspect:
                self._alone = run

    def _place(self, run: Run) -> int | None:
        # Choices of one prompt share its blocks where the first of them is.
        if run.first is None or run.first.job is None:
            return None
        dp_rank = run.first.job.dp_rank
        replica = self._group.roster.find(dp_rank)
        return dp_rank if replica is not None and replica.state is ReplicaState.UP else None


def _deltas(part: StepPart) -> Iterator[tuple[int, Delta]]:
    tops = tops_of(part.tops)
    at = 0
    rows = zip(part.entry_ids, part.positions, part.counts, part.finishes, strict=True)
    for entry_id, position, count, finish in rows:
        end = at + count
        yield (
            entry_id,
            Delta(
                position=position,
                ids=part.token_ids[at * ID_BYTES : end * ID_BYTES],
                logprobs=part.logprobs[at:end],
                tops=tops[at:end],
                finish=finish,
                weight_version=part.weight_version,
            ),
        )
        at = end
