"""What every rank of a replica does alike in a step: apply, plan, compute, commit.

Knows no socket and no clock; the leader and the followers in `rank.py` bring the
records and compare the digests between the two halves.
"""

from radixmesh.errors import RankDesync
from worker.engine.engine import Engine, StepPlan, StepResult
from worker.group.digest import PlanDigest
from worker.group.record import StepRecord
from worker.kvcache.radix import PrefixCache
from worker.request import StepOutput
from worker.schedule.scheduler import Scheduler

_NOTHING = StepResult(ids=[], logprobs=[])


class Turns:
    """One rank's state, a step at a time. `begin` and `complete` alternate."""

    def __init__(
        self, engine: Engine, scheduler: Scheduler, cache: PrefixCache, *, compared: bool
    ) -> None:
        """Take the parts; `compared` is false for a lone rank, which needs no digest."""
        self._engine = engine
        self._scheduler = scheduler
        self._cache = cache
        self._compared = compared
        self._digest = PlanDigest()
        self.step = 0

    def __repr__(self) -> str:
        return f"<Turns step={self.step} {self._digest} {self._scheduler}>"

    @property
    def digest(self) -> int:
        """Over everything planned and drawn so far; 0 where nothing is compared."""
        return self._digest.value

    @property
    def idle(self) -> bool:
        """Whether the next step makes sense only with new input."""
        return self._scheduler.idle

    def begin(self, record: StepRecord) -> StepPlan:
        """Apply a record and plan its step.

        Raises:
            RankDesync: The record does not follow on what this rank did so far.
        """
        if record.step != self.step:
            raise RankDesync(f"got step {record.step}, expected {self.step}")
        if record.digest != self.digest:
            raise RankDesync(f"this rank and rank 0 differ before step {record.step}")
        self._scheduler.apply(record.inputs, now_us=record.now_us)
        plan = self._scheduler.plan(record.step)
        # A replica that has requests and computes nothing would turn for ever.
        assert plan.rows or self._scheduler.idle, "requests wait and nothing can be computed"
        if self._compared:
            self._digest.fold_plan(plan, self._cache.digest)
        return plan

    def complete(self, plan: StepPlan) -> StepOutput:
        """Compute a plan and commit its results."""
        result = self._engine.run(plan) if plan.rows else _NOTHING
        self._scheduler.commit(plan, result)
        if self._compared:
            self._digest.fold_result(result)
        self.step += 1
        return self._scheduler.take_output(plan.step)
