"""What every rank of a replica does alike in a step: apply, plan, launch, commit.

Up to `depth` steps are under way at once. Which step is committed in a turn follows
from the plans alone, never from who was faster, so that all ranks do it alike. Knows
no socket and no clock; the leader and the followers in `rank.py` bring the records
and compare the digests between planning and launching.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from radixmesh.errors import InvalidRequest, NotSupported, RankDesync
from worker.config import RankConfig
from worker.engine.engine import Engine, StepPlan
from worker.group.digest import PlanDigest
from worker.group.plans import Plans
from worker.group.record import StepRecord
from worker.group.verdict import Together, alone
from worker.kvcache.radix import PrefixCache
from worker.request import Answer, StepOutput, Weights
from worker.schedule.limits import Limits
from worker.schedule.scheduler import Input, Scheduler


class Turns:
    """One rank's state, a step at a time. `begin` and `complete` alternate."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        cache: PrefixCache,
        *,
        compared: bool,
        depth: int = 1,
    ) -> None:
        """Take the parts; `compared` is false for a lone rank, which needs no digest."""
        self._engine = engine
        self._scheduler = scheduler
        self._cache = cache
        self._compared = compared
        self.depth = depth
        self._under_way: deque[StepPlan] = deque()
        self._digest = PlanDigest()
        # Told the number of the step that is to be committed, before its result is awaited:
        # for that a stage which stands still would be given as long as a step may take.
        self.before_commit: Callable[[int], None] = lambda _: None
        # What one rank can't do, none does; the loops of `rank.py` ask the others.
        self.together: Together = alone
        # The steps that this turn has committed; rank (0, 0) learns its pace from them.
        self.committed: list[StepPlan] = []
        self.step = 0
        self.plans = Plans(depth + 2)

    def __repr__(self) -> str:
        return f"<Turns step={self.step} {self._digest} {self._scheduler} planned {self.plans}>"

    @property
    def digest(self) -> int:
        """Over everything planned and drawn so far; 0 where nothing is compared."""
        return self._digest.value

    @property
    def idle(self) -> bool:
        """Whether the next step makes sense only with new input."""
        return self._scheduler.idle and not self._under_way

    def begin(self, record: StepRecord) -> StepPlan:
        """Apply a record and plan its step.

        Raises:
            RankDesync: The record does not follow on what this rank did so far.
        """
        if record.step != self.step:
            raise RankDesync(f"got step {record.step}, expected {self.step}")
        if record.digest != self.digest:
            raise RankDesync(f"this rank and rank 0 differ before step {record.step}")
        self.committed.clear()
        plan = self._plan(record)
        if self._compared:
            plan = replace(plan, digest=self._digest.fold_plan(plan, self._cache.digest))
        self.plans.add(plan, self.digest)
        return plan

    def complete(self, plan: StepPlan) -> StepOutput:
        """Launch a plan, and commit the oldest step when its turn has come."""
        if plan.rows:
            self._engine.launch(plan)
            self._under_way.append(plan)
        if len(self._under_way) >= self.depth or (self._under_way and not plan.rows):
            self._commit_oldest()
        self.step += 1
        return self._scheduler.take_output(plan.step)

    def _plan(self, record: StepRecord) -> StepPlan:
        if not record.inputs:
            self._scheduler.apply((), now_us=record.now_us)
        else:
            if self._compared:
                self._digest.fold_inputs(msgspec.msgpack.encode(record.inputs))
            if self._apply(record):
                # What says that the weights are there holds no ids that they drew.
                return StepPlan(record.step, ())
        plan = self._scheduler.plan(record.step)
        # A replica that has requests and computes nothing would turn for ever.
        going = plan.rows or self._under_way or self._scheduler.idle
        assert going, "requests wait and nothing can be computed"
        return plan

    def _apply(self, record: StepRecord) -> bool:
        """Carry out a record's inputs in order; return whether weights were among them."""
        loaded = False
        inputs: list[Input] = []
        for item in record.inputs:
            if isinstance(item, Weights):
                # What stands before it in the record takes effect before it.
                self._scheduler.apply(inputs, now_us=record.now_us)
                inputs = []
                self._load_weights(item)
                loaded = True
            else:
                inputs.append(item)
        self._scheduler.apply(inputs, now_us=record.now_us)
        return loaded

    def _load_weights(self, weights: Weights) -> None:
        while self._under_way:
            self._commit_oldest()
        self.committed.clear()  # what follows takes long, and says nothing of their pace
        verdict = self.together(partial(self._read_weights, weights))
        if verdict.reason:
            self._engine.drop_weights()
        else:
            # Together too: no rank waits by a deadline for another one that still copies.
            verdict = self.together(partial(self._use_weights, verdict))
            self._scheduler.recompute()
        self._scheduler.answer(verdict)

    def _read_weights(self, weights: Weights) -> Answer:
        try:
            self._engine.read_weights(Path(weights.folder))
        except (InvalidRequest, NotSupported) as error:
            return Answer(weights.token, reason=error.reason, message=error.message)
        return Answer(weights.token)

    def _use_weights(self, verdict: Answer) -> Answer:
        self._engine.use_weights()
        return verdict

    def _commit_oldest(self) -> None:
        oldest = self._under_way.popleft()
        self.before_commit(oldest.step)
        result = self._engine.collect()
        self._scheduler.commit(oldest, result)
        self.committed.append(oldest)
        if self._compared:
            self._digest.fold_result(result)


def make_turns(config: RankConfig, engine: Engine) -> Turns:
    """Return the state of one rank on an engine that has its KV cache."""
    info = engine.info
    cache = PrefixCache(block_count=info.kv_blocks, block_tokens=info.block_tokens)
    futures = config.overlap and config.pp == 1
    scheduler = Scheduler(Limits.of(config, info), cache, depth=config.depth, futures=futures)
    compared = config.pp * config.tp > 1
    return Turns(engine, scheduler, cache, compared=compared, depth=config.depth)
