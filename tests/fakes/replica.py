"""A replica in one thread: scheduler, prefix cache and fake engine, driven step by step.

Everything real but the process: it collects what a front would and checks, after
each step, the feed, the digest and the account of all blocks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from radixmesh.blocks import Namespace, pack_ids, split_run, unpack_ids
from tests.fakes.cache_mirror import CacheMirror, audit
from tests.fakes.plans import reserved
from worker.config import FakeConfig
from worker.engine.engine import EngineInfo, StepPlan, run_step
from worker.engine.fake import FakeEngine
from worker.engine.vocabulary import Vocabulary
from worker.kvcache.radix import PrefixCache
from worker.request import Add, Answer, Failed, Inbound, LoadReport, Sampling, Started, StepOutput
from worker.schedule.limits import Limits
from worker.schedule.scheduler import Scheduler

EOS_ID = 2
ORDINARY = tuple(range(3, 40))


def namespace(name: str = "") -> bytes:
    return Namespace(model="tiny", cache_salt=name).encode()


def add(
    request_id: int,
    prompt: Sequence[int],
    *,
    output: Sequence[int] = (),
    sampling: Sampling | None = None,
    salt: str = "",
    priority: int = 0,
    timeout_ms: int = 0,
) -> Add:
    """A request with 8 ids of output, unless `sampling` says otherwise."""
    return Add(
        request_id=request_id,
        prompt=pack_ids(prompt),
        output=pack_ids(output),
        sampling=sampling or Sampling(seed=1, max_tokens=8, ignore_eos=True),
        namespace=namespace(salt),
        priority=priority,
        timeout_ms=timeout_ms,
    )


class FakeReplica:
    """What a front would know of a replica, and the replica itself."""

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        kv_blocks: int = 64,
        max_model_len: int = 128,
        max_running: int = 8,
        max_waiting: int = 100,
        max_batched_tokens: int = 32,
        eos_after: int = 0,
    ) -> None:
        info = EngineInfo(
            block_tokens=block_tokens,
            kv_blocks=kv_blocks,
            max_model_len=max_model_len,
            vocab_size=40,
            eos_ids=(EOS_ID,),
        )
        vocabulary = Vocabulary(
            ordinary=ORDINARY, size=40, eos_ids=(EOS_ID,), max_model_len=max_model_len
        )
        self.limits = Limits(
            max_model_len=min(max_model_len, kv_blocks * block_tokens),
            max_running=max_running,
            max_waiting=max_waiting,
            max_batched_tokens=max_batched_tokens,
            vocab_size=40,
            eos_ids=frozenset((EOS_ID,)),
        )
        self.cache = PrefixCache(block_count=kv_blocks, block_tokens=block_tokens)
        self.scheduler = Scheduler(self.limits, self.cache)
        self.engine = reserved(FakeEngine(vocabulary, info, FakeConfig(eos_after=eos_after), []))
        self.mirror = CacheMirror()
        self.step = 0
        self.plans: list[StepPlan] = []
        self.accepted: list[int] = []
        self.started: dict[int, Started] = {}
        self.outputs: dict[int, list[int]] = {}
        self.starts: dict[int, int] = {}
        self.finishes: dict[int, int] = {}
        self.failed: dict[int, Failed] = {}
        self.answers: list[Answer] = []
        self.ends: Counter[int] = Counter()

    @property
    def load(self) -> LoadReport:
        return self.scheduler.load

    def turn(self, *inputs: Inbound, now_us: int = 0) -> StepOutput:
        """One step with these inputs, checked."""
        self.scheduler.apply(inputs, now_us=now_us)
        plan = self.scheduler.plan(self.step)
        assert plan.rows or self.scheduler.idle
        self.plans.append(plan)
        self.scheduler.commit(plan, run_step(self.engine, plan))
        output = self.scheduler.take_output(self.step)
        self.step += 1
        self._collect(output)
        self.check()
        return output

    def finish(self, limit: int = 2000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(limit):
            if self.scheduler.idle:
                return
            self.turn()
        raise AssertionError("requests do not come to their end")

    def check(self) -> None:
        """Check the account of blocks and that the feed proves the cache."""
        chains = [one.chain for one in self.scheduler._running if one.chain is not None]
        audit(self.cache, chains)
        assert self.mirror.parents.keys() == self.cache._nodes.keys()
        assert self.mirror.digest == self.cache.digest

    def _collect(self, output: StepOutput) -> None:
        self.accepted += output.accepted
        self.answers += output.answers
        self.mirror.apply(output.changes)
        for started in output.started:
            assert started.request_id not in self.started
            self.started[started.request_id] = started
        runs = split_run(output.token_ids, output.counts)
        for request_id, position, raw, finish in zip(
            output.request_ids, output.positions, runs, output.finishes, strict=True
        ):
            self._ids(request_id, position, list(unpack_ids(raw)))
            if finish:
                self.finishes[request_id] = finish
                self.ends[request_id] += 1
        for failure in output.failed:
            self.failed[failure.request_id] = failure
            self.ends[failure.request_id] += 1

    def _ids(self, request_id: int, position: int, ids: Iterable[int]) -> None:
        have = self.outputs.setdefault(request_id, [])
        first = self.starts.setdefault(request_id, position)
        assert position == first + len(have), "ids are lost, doubled or reordered"
        have += ids
