"""One step's plan: decode first, then prefills in chunks, then who joins. Pure."""

from collections.abc import Callable

from worker.engine.engine import Row
from worker.schedule.running import RunningBatch
from worker.schedule.sequence import Sequence
from worker.schedule.waiting import WaitingQueue


def plan_rows(
    running: RunningBatch,
    waiting: WaitingQueue,
    *,
    budget: int,
    on_joined: Callable[[Sequence], None],
    on_retracted: Callable[[Sequence], None],
) -> tuple[Row, ...]:
    """Choose what the next step computes, at most `budget` ids.

    Nobody overtakes the first in the queue.
    """
    for sequence in running.make_room():
        on_retracted(sequence)
    wanted = sum(one.remaining for one in running)
    while wanted < budget:
        head = waiting.first
        if head is None or not running.join(head):
            break
        waiting.remove(head)
        on_joined(head)
        wanted += head.remaining
    decode = running.decode_rows()
    return (*decode, *running.prefill_rows(budget - len(decode)))
