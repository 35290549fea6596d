"""The loop of one rank: the leader (rank (0, 0) of a replica) and the followers.

The leader alone has a clock and a mailbox. Each step it takes what has arrived,
broadcasts it as one record, and all ranks plan; their digests are compared before
anything is computed (see `compare.py`). An idle leader blocks in its mailbox, an idle follower in
the broadcast: neither uses the CPU.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

import msgspec

from radixmesh.errors import RankDesync
from worker.engine.engine import StepPlan
from worker.group.carrier import Leaf, PeerLost, Root
from worker.group.compare import Comparison
from worker.group.mailbox import Mailbox
from worker.group.record import StepRecord, decode_record, encode_record
from worker.group.topology import Topology
from worker.group.turn import Turns
from worker.group.verdict import abide, decide
from worker.group.watchdog import Watchdog
from worker.request import Answer, Inbound, LoadReport, StepOutput
from worker.schedule.output import says_something
from worker.schedule.rates import Rates

logger = logging.getLogger(__name__)


Tamper = Callable[[StepRecord], StepRecord | None]  # None: as if there had been no record


def untouched(record: StepRecord) -> StepRecord:
    """Leave a record as it came."""
    return record


def clock_us() -> int:
    """Microseconds on a clock that never goes back."""
    return time.monotonic_ns() // 1000


class Leader:
    """Rank (0, 0)."""

    def __init__(
        self,
        turns: Turns,
        root: Root,
        mailbox: Mailbox,
        watchdog: Watchdog,
        *,
        shape: Topology,
        clock: Callable[[], int] = clock_us,
    ) -> None:
        """Take the parts; `shape` says which other ranks there are."""
        self._turns = turns
        self._root = root
        self._mailbox = mailbox
        self._watchdog = watchdog
        self._clock = clock
        self._rates = Rates()
        self._launched_us: deque[tuple[int, int]] = deque()
        self._free_us = 0
        self._reported: LoadReport | None = None
        self._comparison = Comparison(root, turns.plans, shape)
        turns.before_commit = self._comparison.before_commit
        turns.together = self._together

    def run(self) -> NoReturn:
        """Turn until the front or a follower is gone.

        Raises:
            FrontGone: The front is gone.
            PeerLost: A follower is gone.
            RankDesync: A follower planned another step.
        """
        try:
            while True:
                self.step()
        except PeerLost:
            # Here is this rank's side; the other's is in the log too, if it still could.
            logger.info("planned last", extra={"plans": str(self._turns.plans)})
            raise

    def step(self) -> None:
        """One turn; blocks for input when there is nothing to compute."""
        inputs = self._mailbox.take(wait=self._turns.idle)
        with self._watchdog.step():
            try:
                output = self._turn(inputs)
            except PeerLost:
                # A rank that finds that it differs ends; what it said before tells more.
                self._comparison.explain()
                raise
        self._publish(output, asked=bool(inputs))

    def _turn(self, inputs: list[Inbound]) -> StepOutput:
        record = StepRecord(
            step=self._turns.step,
            now_us=self._clock(),
            digest=self._turns.digest,
            inputs=inputs,
        )
        self._root.broadcast(encode_record(record))
        plan = self._turns.begin(record)
        self._comparison.before_launch(plan.step, self._turns.digest)
        if plan.rows:
            self._launched_us.append((plan.step, self._clock()))
        output = self._turns.complete(plan)
        self._comparison.after_turn(idle=self._turns.idle)
        for committed in self._turns.committed:
            self._learn(committed)
        return output

    def _together(self, attempt: Callable[[], Answer]) -> Answer:
        # Before it, so that a rank that is told otherwise is found before minutes are spent.
        self._comparison.now(self._turns.step, self._turns.digest)
        with self._watchdog.paused():
            return decide(self._root, attempt())

    def _learn(self, plan: StepPlan) -> None:
        # A step that was under way together with the one before it has had the engine to
        # itself since that one was done.
        while self._launched_us[0][0] < plan.step:
            self._launched_us.popleft()
        _, launched_us = self._launched_us.popleft()
        began_us, self._free_us = max(launched_us, self._free_us), self._clock()
        self._rates.observe(
            prefill_tokens=sum(len(row.ids) for row in plan.rows if row.prefills),
            decode_rows=sum(not row.prefills for row in plan.rows),
            seconds=(self._free_us - began_us) / 1e6,
        )

    def _publish(self, output: StepOutput, *, asked: bool) -> None:
        if not (asked or output.load != self._reported or says_something(output)):
            return
        self._reported = output.load
        load = msgspec.structs.replace(
            output.load,
            prefill_rate=self._rates.prefill_rate,
            decode_step_s=self._rates.decode_step_s,
        )
        self._mailbox.send(msgspec.structs.replace(output, load=load))


class Follower:
    """Every other rank: does what the records say and answers each with its digest."""

    def __init__(
        self, turns: Turns, leaf: Leaf, watchdog: Watchdog, *, tamper: Tamper = untouched
    ) -> None:
        """Take the parts; `tamper` changes this rank's copy of each record, for tests."""
        self._turns = turns
        self._leaf = leaf
        self._watchdog = watchdog
        self._tamper = tamper
        turns.together = self._together

    def run(self) -> NoReturn:
        """Turn until rank (0, 0) is gone.

        Raises:
            PeerLost: Rank (0, 0) is gone.
            RankDesync: This rank differs from rank (0, 0).
        """
        try:
            while True:
                self.step()
        finally:
            # Rank (0, 0) may have ended because the two differ: here is this rank's side.
            logger.info("planned last", extra={"plans": str(self._turns.plans)})

    def step(self) -> StepOutput:
        """One turn; blocks until there is a record."""
        record = None
        while record is None:
            record = self._tamper(decode_record(self._leaf.receive()))
        with self._watchdog.step():
            try:
                plan = self._turns.begin(record)
            except RankDesync:
                # Its mark tells rank (0, 0) that they differ.
                self._leaf.mark(self._turns.digest)
                raise
            self._leaf.mark(self._turns.digest)
            return self._turns.complete(plan)

    def _together(self, attempt: Callable[[], Answer]) -> Answer:
        self._leaf.mark(self._turns.digest)
        with self._watchdog.paused():
            return abide(self._leaf, attempt())
