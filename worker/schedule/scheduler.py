"""The scheduler of a replica: inputs in, plan out, results in, output out.

Every rank runs it on the same records and makes the same plans. Continuous
batching, chunked prefill, prefix reuse, retraction, deadlines. Knows no clock
(records bring the time), no socket, no tensor.
"""

from collections.abc import Iterable
from typing import Final, assert_never

from radixmesh.errors import DeadlineExceeded, MeshError, QueueFull
from worker.engine.engine import StepPlan, StepResult
from worker.kvcache.radix import PrefixCache
from worker.request import (
    GOES_ON,
    Add,
    Answer,
    Cancel,
    Flush,
    Inbound,
    LoadReport,
    Pause,
    Probe,
    StepOutput,
    Weights,
)
from worker.schedule.check import check
from worker.schedule.limits import Limits
from worker.schedule.output import OutputColumns
from worker.schedule.plan import plan_rows
from worker.schedule.running import RunningBatch
from worker.schedule.sequence import Sequence
from worker.schedule.waiting import WaitingQueue

_NEVER: Final = 1 << 63


class Scheduler:
    """State of all requests of one replica.

    A turn is `apply`, `plan`, `commit`, `take_output`, in this order.
    """

    def __init__(self, limits: Limits, cache: PrefixCache) -> None:
        self._limits = limits
        self._cache = cache
        self._waiting = WaitingQueue()
        self._running = RunningBatch(cache, limit=limits.max_running)
        self._alive: dict[int, Sequence] = {}
        self._columns = OutputColumns()
        self._arrivals = 0
        self._now_us = 0
        self._next_deadline_us = _NEVER
        self._last_request_id = 0

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting>"

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute until the next input."""
        return not self._alive

    @property
    def load(self) -> LoadReport:
        """Absolute load; the rates are rank (0, 0)'s to fill in."""
        return LoadReport(
            running=len(self._running),
            waiting=len(self._waiting),
            uncached_tokens=self._waiting.uncached_tokens + self._running.uncached_tokens,
            free_blocks=self._cache.available,
            prefill_rate=0.0,
            decode_step_s=0.0,
            last_request_id=self._last_request_id,
        )

    def apply(self, inputs: Iterable[Inbound], *, now_us: int) -> None:
        """Take a record's inputs in order, then end what is past its deadline."""
        self._now_us = now_us
        for item in inputs:
            match item:
                case Add():
                    self._add(item)
                case Cancel():
                    self._cancel(item.request_ids)
                case Flush():
                    self._columns.answer(Answer(item.token, self._cache.clear()))
                case Probe():
                    self._columns.answer(Answer(item.token))
                case Pause() | Weights():
                    raise NotImplementedError
                case _:
                    assert_never(item)
        if now_us >= self._next_deadline_us:
            self._expire()

    def plan(self, step: int) -> StepPlan:
        """Choose what this step computes. The plan's blocks are taken at once."""
        rows = plan_rows(
            self._running,
            self._waiting,
            budget=self._limits.max_batched_tokens,
            on_joined=self._started,
            on_retracted=self._enqueue,
        )
        return StepPlan(step=step, rows=rows)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take what the engine computed for the plan.

        Raises:
            ValueError: The result does not fit the plan; the replica is broken.
        """
        drawn = zip(result.ids, result.logprobs, strict=True)
        for row in plan.rows:
            sequence = self._alive[row.request_id]
            self._running.computed(sequence, len(row.ids))
            if row.sampled:
                token_id, logprob = next(drawn, (-1, 0.0))
                self._draw(sequence, token_id, logprob)
        if next(drawn, None) is not None:
            raise ValueError("the engine drew more ids than the plan asked for")

    def take_output(self, step: int) -> StepOutput:
        """Return what this turn has to say."""
        return self._columns.take(
            step, changes=self._cache.take_changes(), digest=self._cache.digest, load=self.load
        )

    def _add(self, add: Add) -> None:
        self._last_request_id = max(self._last_request_id, add.request_id)
        if add.request_id in self._alive:
            return  # The front never reuses a number; a double must not touch the first.
        try:
            self._check_room()
            check(add, self._limits)
        except MeshError as error:
            self._columns.fail(add.request_id, error)
            return
        self._arrivals += 1
        sequence = Sequence(
            add,
            limits=self._limits,
            block_tokens=self._cache.block_tokens,
            arrival=self._arrivals,
            now_us=self._now_us,
        )
        self._columns.accept(add.request_id)
        if sequence.finish != GOES_ON:
            self._columns.finish_at_once(add.request_id, sequence.output_tokens, sequence.finish)
            return
        self._alive[add.request_id] = sequence
        self._enqueue(sequence)
        if sequence.deadline_us:
            self._next_deadline_us = min(self._next_deadline_us, sequence.deadline_us)

    def _check_room(self) -> None:
        # Free places count too: a burst that will start in this very step is not a queue.
        limit = self._limits.max_waiting + self._limits.max_running
        if len(self._alive) >= limit:
            raise QueueFull("the replica's queue is full", limit=self._limits.max_waiting)

    def _enqueue(self, sequence: Sequence) -> None:
        cached = self._cache.matched_blocks(sequence.keyed, len(sequence.keyed.keys))
        sequence.uncached = max(1, len(sequence) - cached * self._cache.block_tokens)
        self._waiting.push(sequence)

    def _started(self, sequence: Sequence) -> None:
        if sequence.started:
            return
        sequence.started = True
        self._columns.start(
            sequence.request_id,
            cached_tokens=sequence.computed,
            waited_us=max(0, self._now_us - sequence.accepted_us),
        )

    def _draw(self, sequence: Sequence, token_id: int, logprob: float) -> None:
        if not 0 <= token_id < self._limits.vocab_size:
            raise ValueError(f"the engine drew {token_id}")
        position = sequence.output_tokens
        sequence.keyed.append(token_id)
        finish = sequence.finish
        self._columns.token(sequence.request_id, position, token_id, finish)
        self._columns.logprob(logprob, asked=sequence.sampling.logprobs)
        if finish != GOES_ON:
            self._forget(sequence)

    def _cancel(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            sequence = self._alive.get(request_id)
            if sequence is not None:
                self._forget(sequence)

    def _expire(self) -> None:
        late = [one for one in self._alive.values() if 0 < one.deadline_us <= self._now_us]
        for sequence in late:
            self._forget(sequence)
            self._columns.fail(
                sequence.request_id, DeadlineExceeded("the deadline passed at the worker")
            )
        deadlines = (one.deadline_us for one in self._alive.values() if one.deadline_us)
        self._next_deadline_us = min(deadlines, default=_NEVER)

    def _forget(self, sequence: Sequence) -> None:
        del self._alive[sequence.request_id]
        if sequence.chain is None:
            self._waiting.remove(sequence)
        else:
            self._running.leave(sequence)
