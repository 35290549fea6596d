"""The scheduler of a replica: inputs in, plan out, results in, output out.

Every rank runs it on the same records and makes the same plans. Continuous
batching, chunked prefill, prefix reuse, retraction, deadlines. Knows no clock
(records bring the time), no socket, no tensor.
"""

from collections import deque
from collections.abc import Iterable
from typing import Final, assert_never

from radixmesh.errors import DeadlineExceeded, MeshError, QueueFull
from worker.engine.engine import Row, StepPlan, StepResult
from worker.kvcache.radix import PrefixCache
from worker.request import (
    GOES_ON,
    Add,
    Answer,
    Cancel,
    Flush,
    LoadReport,
    Pause,
    Probe,
    StepOutput,
    Tops,
)
from worker.schedule.admission import Admission
from worker.schedule.check import check
from worker.schedule.draws import Draw, draws_of
from worker.schedule.limits import Limits
from worker.schedule.output import OutputColumns
from worker.schedule.plan import Flight, plan_rows
from worker.schedule.running import RunningBatch
from worker.schedule.sequence import Sequence
from worker.schedule.waiting import WaitingQueue

# What reaches a scheduler. Weights need the engine, so the turn carries them out.
Input = Add | Cancel | Flush | Probe | Pause

_NEVER: Final = 1 << 63


class Scheduler:
    """State of all requests of one replica.

    A turn is `apply`, `plan`, perhaps the `commit` of the oldest plan that has rows,
    `take_output`, in this order. A request that ends or loses its place does so at once;
    what steps under way compute for it is dropped when they are committed.
    """

    def __init__(
        self, limits: Limits, cache: PrefixCache, *, depth: int = 1, futures: bool = False
    ) -> None:
        """Take the parts.

        `depth` is how many plans may be uncommitted at once, the newest among them. With
        `futures` a plan may go on from ids that the plan before it draws.
        """
        assert not futures or depth <= 2, "a future id is one of the step just before"
        self._limits = limits
        self._cache = cache
        self._depth = depth
        self._futures = futures
        self._flights: deque[Flight] = deque()
        self._waiting = WaitingQueue()
        self._running = RunningBatch(cache, limit=limits.max_running)
        self._admission = Admission(
            limits,
            cache,
            self._waiting,
            self._running,
            on_joined=self._started,
            on_retracted=self._enqueue,
        )
        self._alive: dict[int, Sequence] = {}
        self._columns = OutputColumns()
        self._pauses: list[int] = []
        self._paused = False
        self._arrivals = 0
        self._now_us = 0
        self._next_deadline_us = _NEVER
        self._last_request_id = 0

    def __repr__(self) -> str:
        return (
            f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting, "
            f"{len(self._flights)} steps under way{', paused' if self._paused else ''}>"
        )

    @property
    def idle(self) -> bool:
        """Whether there is nothing to plan until the next input.

        Also while paused, though requests wait: deadlines that pass then are noticed with
        the next record, and a probe brings one every few seconds.
        """
        return self._paused or not self._alive

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

    def apply(self, inputs: Iterable[Input], *, now_us: int) -> None:
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
                case Pause():
                    self._pause(item)
                case _:
                    assert_never(item)
        if now_us >= self._next_deadline_us:
            self._expire()

    def plan(self, step: int) -> StepPlan:
        """Choose what this step computes. The plan's blocks are taken at once.

        A plan that has rows is launched, and committed in its turn; one without is not.
        """
        assert len(self._flights) < self._depth, "too many steps are under way"
        if self._paused or not self._alive:
            return StepPlan(step, ())
        for sequence in self._running.make_room():
            self._enqueue(sequence)
        self._admission.admit(self._now_us)
        flight = Flight(step)
        rows = plan_rows(
            self._running,
            flight,
            budget=self._limits.max_batched_tokens,
            spread=1 if self._futures else self._depth,
            free=1 if self._futures else self._depth - len(self._flights),
            before=self._flights[-1] if self._futures and self._flights else None,
        )
        if rows:
            self._flights.append(flight)
        return StepPlan(step, rows)

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Take what the engine computed for the oldest plan under way.

        Raises:
            ValueError: The result does not fit the plan; the replica is broken.
        """
        flight = self._flights.popleft()
        assert flight.step == plan.step, "steps are committed in their order"
        draws = draws_of(result)
        prompt = iter(result.prompt)
        for row, (sequence, residence) in zip(plan.rows, flight.owners, strict=True):
            draw = next(draws, None) if row.sampled else None
            scores = next(prompt, None) if row.targets is not None else None
            if sequence.chain is None or sequence.residence != residence:
                continue
            self._running.computed(sequence, len(row.ids))
            if row.targets is not None:
                self._score(sequence, row, scores)
            if row.sampled:
                self._draw(sequence, draw)
        if next(draws, None) is not None:
            raise ValueError("the engine drew more ids than the plan asked for")
        self._answer_pauses()

    def recompute(self) -> None:
        """Let all running requests wait and empty the cache: the KV is worth nothing now."""
        assert not self._flights, "a step is under way"
        retracted = list(self._running)
        for sequence in retracted:
            self._running.leave(sequence)
        self._cache.clear()
        for sequence in retracted:
            self._enqueue(sequence)

    def answer(self, answer: Answer) -> None:
        """Say what became of a control that was carried out elsewhere."""
        self._columns.answer(answer)

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
        cached = self._cache.matched_blocks(sequence.keyed, sequence.reusable_blocks)
        keys = sequence.keyed.keys[: sequence.reusable_blocks]
        coming = max(self._waiting.expects(keys, cached), self._running.brings(keys, cached))
        sequence.uncached = max(1, len(sequence) - coming * self._cache.block_tokens)
        sequence.brings = keys[cached:]
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

    def _draw(self, sequence: Sequence, draw: Draw | None) -> None:
        if draw is None or not 0 <= draw.token_id < self._limits.vocab_size:
            raise ValueError(f"the engine drew {draw}")
        position = sequence.output_tokens
        sequence.pending -= 1
        sequence.keyed.append(draw.token_id)
        finish = sequence.finish
        self._columns.token(
            sequence.request_id, position, draw, finish, asked=sequence.sampling.logprobs
        )
        if finish != GOES_ON:
            self._forget(sequence)

    def _score(self, sequence: Sequence, row: Row, scores: tuple[list[float], Tops] | None) -> None:
        wanted = len(row.targets or ())
        if scores is None or len(scores[0]) != wanted:
            raise ValueError(f"the engine did not score {wanted} prompt ids")
        logprobs, tops = scores
        # A request that was retracted may compute again what it has told already.
        skip = max(0, sequence.scored - row.start)
        if skip < wanted:
            self._columns.prompt_scores(
                sequence.request_id, row.start + 1, logprobs, tops, skip=skip
            )
            sequence.scored = row.start + wanted

    def _pause(self, pause: Pause) -> None:
        self._paused = pause.paused
        self._pauses.append(pause.token)
        self._answer_pauses()

    def _answer_pauses(self) -> None:
        # Who lets it go on again waits for nothing, and who had it paused waits in vain.
        if self._pauses and not (self._paused and self._flights):
            for token in self._pauses:
                self._columns.answer(Answer(token))
            self._pauses.clear()

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
