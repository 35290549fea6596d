"""The model of a worker: continuous batching, chunked prefill, an LRU prefix cache. Virtual time.

A step computes one id of each decoding request and, with what is left of its budget, chunks
of prefills: those that run first, in order, then those that join, first come first served.
It takes `max(floor_s, prefill ids / rate) + decode rows * row_s`. Who joins reuses the longest
cached prefix and takes blocks for its prompt and its whole output; who finds the next block of
its prefix being computed waits for it, and may be overtaken. The first output id comes with the
last chunk of the prompt; that instant is the end of the prefill.

Steps that are alike are taken together, half a second of them at most while something is
prefilled. What this approximates: blocks and loads show at the end of such a run, and the
learned rates take a run as one observation. Not modelled: attention that grows with the
context, retraction (output blocks are taken at the start), priorities, failures. Output
always ends where the job says.

`serial` is another, simpler model: one prefill at a time, the whole step for it, and
decoding costs nothing. It is what prefill-only studies of routing use.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.replay.cache import BlockCache, Chain
from bench.replay.clock import Clock
from bench.replay.job import Job, ReplayError, reusable_blocks
from router.fleet.changes import Change
from worker.schedule.expected import Expected, common
from worker.schedule.rates import Rates

_TOGETHER_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a worker is and how much fits.

    Attributes:
        rate: Prompt ids a second.
        floor_s: Seconds of a step, whatever is in it.
        row_s: Seconds that each decoding request adds to a step.
        budget: Ids computed in one step.
        max_running: Requests in one step.
        cache_blocks: Blocks of the KV cache.
        block_tokens: Ids of a block.
        serial: Whether it is the prefill-only model.
    """

    rate: float
    cache_blocks: int
    block_tokens: int
    floor_s: float = 0.02
    row_s: float = 0.00015
    budget: int = 512
    max_running: int = 256
    serial: bool = False


class Load(NamedTuple):
    """How a worker stood from an instant on; `uncached` falls by `pace` ids a second."""

    since: float
    running: int
    waiting: int
    uncached: float
    pace: float
    free_blocks: int
    prefill_rate: float
    decode_step_s: float


class Entry:
    """One job at one worker.

    Attributes:
        on_first: Told at the end of its prefill.
        on_end: Told when its output is whole.
        computed: Prompt ids that it computed; known when it has joined.
        uncached: Prompt ids to compute, as it looked when it came; what a sibling computes
            counts only there.
        brings: Keys of blocks that were not cached then.
        done: Prompt ids that are computed or were found.
    """

    __slots__ = ("brings", "chain", "computed", "done", "job", "on_end", "on_first", "uncached")

    def __init__(self, job: Job, on_first: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.job = job
        self.on_first = on_first
        self.on_end = on_end
        self.computed = self.uncached = self.done = 0
        self.chain: Chain | None = None
        self.brings: Sequence[int] = ()

    @property
    def remaining(self) -> int:
        """Prompt ids still to compute."""
        return self.job.tokens - self.done


class _Run(NamedTuple):
    """Steps that are alike."""

    began: float
    step_s: float
    steps: int
    chunks: list[tuple[Entry, int]]
    rows: int
    room: bool  # whether a newcomer could join


class Worker:
    """One replica. `publish` is told each change of its cache."""

    def __init__(self, clock: Clock, pace: Pace, publish: Callable[[Change], None]) -> None:
        self.pace = pace
        self.cache = BlockCache(pace.cache_blocks, publish)
        self.busy_s = 0.0  # seconds of steps that computed something of a prompt
        self.loads: list[Load] = [Load(0.0, 0, 0, 0.0, 0.0, pace.cache_blocks, 0.0, 0.0)]
        self._clock = clock
        self._rates = Rates()
        self._waiting: deque[Entry] = deque()
        self._waiting_uncached = 0
        self._expected = Expected()
        self._prefilling: list[Entry] = []
        self._decoding: list[tuple[int, int, Entry]] = []  # by the step in which they end
        self._steps = 0
        self._serial = 0
        self._run: _Run | None = None
        self._turn = 0

    @property
    def running(self) -> int:
        """Requests that hold blocks."""
        return len(self._prefilling) + len(self._decoding)

    def submit(self, entry: Entry) -> None:
        """A request is here now.

        Raises:
            ReplayError: It never fits.
        """
        job, block = entry.job, self.pace.block_tokens
        if self._blocks(job) > self.cache.total:
            raise ReplayError(f"a request of {job.tokens} ids is larger than a worker's cache")
        keys = job.keys[: reusable_blocks(job, block)]
        held = self.cache.depth(job.keys, len(keys))
        prefills = (common(keys, other.job.keys, held) for other in self._prefilling)
        coming = max(self._expected.depth(keys, held), max(prefills, default=held))
        entry.uncached = max(1, job.tokens - coming * block)
        entry.brings = keys[held:]
        self._expected.add(entry.brings)
        self._waiting.append(entry)
        self._waiting_uncached += entry.uncached
        if self._run is None:
            self._plan()
            return
        self._note(self._run)
        if self._run.room:
            self._cut(self._run)

    def _cut(self, run: _Run) -> None:
        """End a run with the step that is under way."""
        steps = int((self._clock.now - run.began) / run.step_s) + 1
        if steps < run.steps:
            self._start(run._replace(steps=steps))

    def _start(self, run: _Run) -> None:
        self._run = run
        self._turn += 1
        turn = self._turn
        end = run.began + run.steps * run.step_s
        self._clock.at(end, lambda: self._finish(run) if turn == self._turn else None)

    def _plan(self) -> None:
        now, pace = self._clock.now, self.pace
        rows = 0 if pace.serial else len(self._decoding)
        chunks, left = self._chunks(max(1, pace.budget - rows))
        self._run = None
        if chunks or rows:
            ids = sum(count for _, count in chunks)
            step_s = ids / pace.rate
            if not pace.serial:
                step_s = max(pace.floor_s, step_s) + rows * pace.row_s
            room = left > 0 and self.running < pace.max_running and not pace.serial
            steps = self._alike(chunks, left, step_s)
            self._start(_Run(now, step_s, steps, chunks, rows, room))
        self._note(self._run)

    def _chunks(self, left: int) -> tuple[list[tuple[Entry, int]], int]:
        chunks: list[tuple[Entry, int]] = []
        for entry in self._prefilling:
            if left <= 0:
                return chunks, left
            count = min(entry.remaining, left)
            chunks.append((entry, count))
            left -= count
        while left > 0 and self._waiting and not (self.pace.serial and chunks):
            joined = self._admit()
            if joined is None:
                break
            count = min(joined.remaining, left)
            chunks.append((joined, count))
            left -= count
        return chunks, left

    def _alike(self, chunks: list[tuple[Entry, int]], left: int, step_s: float) -> int:
        """How many steps in a row are like the next one."""
        steps = self._decoding[0][0] - self._steps if self._decoding else 1 << 30
        if not chunks:
            return steps
        if len(chunks) > 1 or left:
            return 1
        entry, count = chunks[0]
        return max(1, min(steps, entry.remaining // count, int(_TOGETHER_S / step_s)))

    def _admit(self) -> Entry | None:
        """Let one join: the first, but for those that wait for a sibling."""
        if self.running >= self.pace.max_running:
            return None
        under_way = {entry.chain.next_key for entry in self._prefilling if entry.chain} - {0}
        for index, entry in enumerate(self._waiting):
            job = entry.job
            limit = reusable_blocks(job, self.pace.block_tokens)
            held = self.cache.depth(job.keys, limit)
            if held < limit and job.keys[held] in under_way:
                continue
            chain = self.cache.open((*job.keys, *job.tail), limit, self._blocks(job))
            if chain is None:
                return None
            del self._waiting[index]
            self._join(entry, chain)
            return entry
        return None

    def _join(self, entry: Entry, chain: Chain) -> None:
        entry.chain = chain
        entry.done = len(chain.path) * self.pace.block_tokens
        entry.computed = entry.remaining
        self._waiting_uncached -= entry.uncached
        self._expected.remove(entry.brings)
        self._prefilling.append(entry)

    def _blocks(self, job: Job) -> int:
        return -(-(job.tokens + job.output) // self.pace.block_tokens)

    def _finish(self, run: _Run) -> None:
        seconds = run.steps * run.step_s
        ids = sum(count for _, count in run.chunks)
        if ids:
            self.busy_s += seconds
        self._rates.observe(prefill_tokens=ids, decode_rows=run.rows, seconds=run.step_s)
        self._steps += run.steps
        for entry, count in run.chunks:
            self._advance(entry, count * run.steps)
        while self._decoding and self._decoding[0][0] <= self._steps:
            self._end(heapq.heappop(self._decoding)[2])
        self._plan()

    def _advance(self, entry: Entry, count: int) -> None:
        assert entry.chain is not None
        entry.done += count
        self.cache.store(
            entry.chain, min(entry.done // self.pace.block_tokens, len(entry.job.keys))
        )
        if entry.remaining:
            return
        self._prefilling.remove(entry)
        entry.on_first()
        more = 0 if self.pace.serial else entry.job.output - 1
        if not more:
            self._end(entry)
            return
        self._serial += 1
        heapq.heappush(self._decoding, (self._steps + more, self._serial, entry))

    def _end(self, entry: Entry) -> None:
        assert entry.chain is not None
        self.cache.store(entry.chain, len(entry.chain.keys))
        self.cache.close(entry.chain)
        entry.chain = None
        entry.on_end()

    def _note(self, run: _Run | None) -> None:
        """Keep how it stands from now on, for the reports of this instant and later ones."""
        now, pace = self._clock.now, 0.0
        left = float(sum(entry.remaining for entry in self._prefilling))
        if run is not None:
            pace = sum(count for _, count in run.chunks) / run.step_s
            left -= pace * (now - run.began)
        self.loads.append(
            Load(
                now,
                self.running,
                len(self._waiting),
                left + self._waiting_uncached,
                pace,
                self.cache.available,
                self._rates.prefill_rate,
                self._rates.decode_step_s,
            )
        )
