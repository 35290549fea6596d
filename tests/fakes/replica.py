"""A replica in one thread: turns, scheduler, prefix cache and fake engine, step by step.

Everything real but the process: it collects what a front would and checks, after
each step, the feed, the digest and the account of all blocks. Its engine computes as
late as one may, so a plan that somebody changes afterwards gives other ids.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from radixmesh.blocks import Namespace, pack_ids, split_run, unpack_ids
from tests.fakes.cache_mirror import CacheMirror, audit
from tests.fakes.plans import reserved
from worker.config import FakeConfig
from worker.engine.engine import EngineInfo, Row, StepPlan, StepResult
from worker.engine.fake import FakeEngine
from worker.engine.futures import resolve
from worker.engine.vocabulary import Vocabulary
from worker.group.record import StepRecord
from worker.group.turn import Turns
from worker.kvcache.radix import PrefixCache
from worker.request import (
    Add,
    Answer,
    Failed,
    Inbound,
    LoadReport,
    Sampling,
    Started,
    StepOutput,
    Tops,
)
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


class LateEngine(FakeEngine):
    """Computes a step only when it is collected, when later ones are planned already.

    A prompt id is scored with minus itself and the one alternative 0, a drawn id's
    alternatives are itself and 0, as many as asked.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._launched: deque[StepPlan] = deque()
        self._last = StepResult([], [])

    def launch(self, plan: StepPlan) -> None:
        assert plan.rows
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = resolve(self._launched.popleft(), self._last)
        super().launch(plan)
        result = super().collect()
        prompt = [self._scores(row) for row in plan.rows if row.targets is not None]
        drawn = [row.sampling for row in plan.rows if row.sampled]
        self._last = replace(result, prompt=prompt, tops=self._tops(result.ids, drawn))
        return self._last

    @staticmethod
    def _scores(row: Row) -> tuple[list[float], Tops]:
        targets = row.targets
        assert targets is not None
        assert 0 < len(targets) <= len(row.ids)
        known = zip(row.ids[1:], targets, strict=False)
        assert all(one == other for one, other in known), "targets are not the next ids"
        count = min(1, row.sampling.top_logprobs) * len(targets)
        tops = Tops([min(1, row.sampling.top_logprobs)] * len(targets), [0] * count, [-0.5] * count)
        return [-float(one) for one in targets], tops

    @staticmethod
    def _tops(ids: list[int], drawn: list[Sampling]) -> Tops:
        if not any(one.top_logprobs for one in drawn):
            return Tops()
        tops = Tops([], [], [])
        for token_id, sampling in zip(ids, drawn, strict=True):
            best = [token_id, 0][: sampling.top_logprobs]
            tops.counts.append(len(best))
            tops.ids.extend(best)
            tops.logprobs.extend([-0.25] * len(best))
        return tops


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
        depth: int = 1,
        futures: bool = False,
        prefix_first: bool = True,
        ageing_us: int = 1_000_000,
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
            prefix_first=prefix_first,
            ageing_us=ageing_us,
        )
        self.cache = PrefixCache(block_count=kv_blocks, block_tokens=block_tokens)
        self.scheduler = Scheduler(self.limits, self.cache, depth=depth, futures=futures)
        self.engine = reserved(LateEngine(vocabulary, info, FakeConfig(eos_after=eos_after), []))
        self.turns = Turns(self.engine, self.scheduler, self.cache, compared=True, depth=depth)
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
        self.prompt_scores: dict[int, list[float]] = {}
        self.tops: dict[int, list[list[int]]] = {}

    @property
    def load(self) -> LoadReport:
        return self.scheduler.load

    def turn(self, *inputs: Inbound, now_us: int = 0) -> StepOutput:
        """One step with these inputs, checked."""
        record = StepRecord(self.step, now_us, self.turns.digest, list(inputs))
        plan = self.turns.begin(record)
        self.plans.append(plan)
        self.check()
        output = self.turns.complete(plan)
        self.step += 1
        self._collect(output)
        self.check()
        self.mirror_is_true()
        return output

    def finish(self, limit: int = 2000) -> None:
        """Turn until nothing is left to do."""
        for _ in range(limit):
            if self.turns.idle:
                return
            self.turn()
        raise AssertionError("requests do not come to their end")

    def check(self) -> None:
        """Check the account of blocks."""
        chains = [one.chain for one in self.scheduler._running if one.chain is not None]
        audit(self.cache, chains)

    def mirror_is_true(self) -> None:
        """Check that the feed proves the cache."""
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
        self._scored(output)
        for failure in output.failed:
            self.failed[failure.request_id] = failure
            self.ends[failure.request_id] += 1

    def _ids(self, request_id: int, position: int, ids: Iterable[int]) -> None:
        have = self.outputs.setdefault(request_id, [])
        first = self.starts.setdefault(request_id, position)
        assert position == first + len(have), "ids are lost, doubled or reordered"
        have += ids

    def _scored(self, output: StepOutput) -> None:
        for scores in output.prompt_scores:
            have = self.prompt_scores.setdefault(scores.request_id, [])
            assert scores.position == 1 + len(have), "scores are lost, doubled or reordered"
            assert len(scores.tops.counts) == len(scores.logprobs)
            have += scores.logprobs
        at = 0
        for request_id, count in zip(_each_id(output), output.tops.counts, strict=False):
            best = output.tops.ids[at : at + count]
            self.tops.setdefault(request_id, []).append(best)
            at += count
        assert at == len(output.tops.ids)


def _each_id(output: StepOutput) -> Iterable[int]:
    for request_id, count in zip(output.request_ids, output.counts, strict=True):
        yield from [request_id] * count
