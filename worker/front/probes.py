"""Whether the ranks of each replica are there: a question that all of them must answer.

The answer comes once every rank has planned the step that brought the question, so it
proves the whole replica, busy or idle; what else a replica says proves nothing here. A
replica that leaves it unanswered gets no new work, and after some more time is given up.
One that reads new weights answers nothing meanwhile, and is not asked; that has a limit of
its own.
Knows replicas and times; no sockets.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from radixmesh.errors import GroupLost
from worker.front.controls import Controls
from worker.front.replica import Hold, Replica, ReplicaState
from worker.request import Probe

logger = logging.getLogger(__name__)

# At most so much of the time between two ticks counts: while this process itself stood
# still, nobody's answers could be heard.
MAX_TICK_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePace:
    """Times of probes, in seconds.

    Attributes:
        interval_s: From one question to the next.
        timeout_s: A replica that leaves one unanswered for so long gets no new work.
        give_up_s: After so long it is started anew.
        reading_s: One that reads new weights can answer nothing. After so long it is
            started anew.
    """

    interval_s: float
    timeout_s: float
    give_up_s: float
    reading_s: float

    @property
    def tick_s(self) -> float:
        """How often to look, so that every time is kept to a fraction of itself."""
        return min(1.0, self.interval_s, self.timeout_s / 2, self.give_up_s / 2)


@dataclass(slots=True)
class _Watch:
    """One life of a replica: when to ask next, and how long an answer is due."""

    due_at: float
    waits: bool = False
    unanswered_s: float = 0.0
    reading_s: float = 0.0


class Probes:
    """Asks, one question at a time of each replica.

    `on_silent` is told of a replica that takes too long, `on_heard` of every answer and of
    the seconds that it took.
    """

    def __init__(
        self,
        controls: Controls,
        pace: ProbePace,
        *,
        on_silent: Callable[[Replica], None],
        on_heard: Callable[[Replica, float], None],
        clock: Callable[[], float],
    ) -> None:
        self.pace = pace
        self._controls = controls
        self._on_silent = on_silent
        self._on_heard = on_heard
        self._clock = clock
        self._watches: dict[Replica, _Watch] = {}
        self._ticked_at = 0.0

    def tick(self, replicas: Iterable[Replica]) -> None:
        """Ask who is to be asked, and judge who has not answered."""
        now = self._clock()
        passed_s = min(now - self._ticked_at, MAX_TICK_S)
        self._ticked_at = now
        for replica in replicas:
            if replica.state is ReplicaState.DOWN:
                continue
            watch = self._watches.get(replica)
            if watch is None:
                watch = self._watches[replica] = _Watch(due_at=now)
            if self._controls.reads_weights(replica):
                watch.reading_s += passed_s
                self._judge_reading(replica, watch.reading_s)
                continue
            watch.reading_s = 0.0
            if watch.waits:
                watch.unanswered_s += passed_s
                self._judge(replica, watch.unanswered_s)
            elif now >= watch.due_at:
                self._ask(replica, watch, now)

    def _judge_reading(self, replica: Replica, reading_s: float) -> None:
        if reading_s > self.pace.reading_s:
            replica.give_up(GroupLost(f"the replica has read new weights for {reading_s:.0f} s"))

    def _judge(self, replica: Replica, unanswered_s: float) -> None:
        if unanswered_s > self.pace.give_up_s:
            replica.give_up(GroupLost(f"the replica has been stuck for {unanswered_s:.0f} s"))
        elif unanswered_s > self.pace.timeout_s and Hold.SILENT not in replica.holds:
            extra = {"dp_rank": replica.dp_rank, "seconds": round(unanswered_s, 1)}
            logger.warning("replica does not answer", extra=extra)
            self._on_silent(replica)

    def _ask(self, replica: Replica, watch: _Watch, now: float) -> None:
        try:
            answer = self._controls.order(replica, Probe)
        except GroupLost:
            return  # its end is about to be told
        watch.waits, watch.unanswered_s = True, 0.0
        watch.due_at = now + self.pace.interval_s
        answer.add_done_callback(partial(self._answered, replica, watch, now))

    def _answered(
        self, replica: Replica, watch: _Watch, asked_at: float, answer: asyncio.Future[int]
    ) -> None:
        if answer.exception() is not None:
            self._watches.pop(replica, None)  # that life is over
            return
        watch.waits = False
        self._on_heard(replica, self._clock() - asked_at)
