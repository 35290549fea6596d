"""A supervisor for each replica of a group, as many as the group wants at the time.

A replica that retires is ended when it has nothing left to do, or when its grace is
over, and is then taken from the group, the highest first, so that dp_ranks have no
hole. One that is wanted again before its ranks were told to stop goes on as it is; one
whose ranks are stopping starts anew after that. Knows neither requests nor processes.
"""

import asyncio
import logging

from worker.front.group import Group
from worker.front.replica import Hold, Replica
from worker.front.supervisor import Launch, Pace, Supervisor

logger = logging.getLogger(__name__)


class Crew:
    """Keeps the replicas of one group alive while `run` runs; their ranks are gone after it."""

    def __init__(self, group: Group, launch: Launch, pace: Pace, *, retire_grace_s: float) -> None:
        self._group = group
        self._launch = launch
        self._pace = pace
        self._retire_grace_s = retire_grace_s
        self._kept: set[Replica] = set()

    def __repr__(self) -> str:
        return f"Crew({len(self._kept)} kept)"

    async def run(self) -> None:
        """Keep all replicas, those to come too, until cancelled.

        Raises:
            ExceptionGroup: Of a `GroupEnded`.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                for replica in self._group.replicas:
                    if replica not in self._kept:
                        self._kept.add(replica)
                        tasks.create_task(self._keep(replica))
                await self._group.changed.until(
                    lambda: any(each not in self._kept for each in self._group.replicas)
                )

    async def _keep(self, replica: Replica) -> None:
        try:
            while True:
                await self._run(replica)
                if await self._leaves(replica):
                    return
        finally:
            self._kept.discard(replica)

    async def _run(self, replica: Replica) -> None:
        """Keep it alive until it is to go and has nothing left to do."""
        supervisor = Supervisor(replica, self._group, self._launch, self._pace)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(supervisor.run())
            while not await self._retires(replica):
                logger.info("replica taken back", extra={"dp_rank": replica.dp_rank})
            logger.info(
                "replica ends", extra={"dp_rank": replica.dp_rank, "running": len(replica.jobs)}
            )
            running.cancel()

    async def _retires(self, replica: Replica) -> bool:
        """Return when it has retired; False: it was wanted again."""
        await self._group.changed.until(lambda: _retiring(replica))
        done = asyncio.ensure_future(self._group.idled.until(lambda: not replica.jobs))
        back = asyncio.ensure_future(self._group.changed.until(lambda: not _retiring(replica)))
        try:
            await asyncio.wait(
                (done, back),
                timeout=self._retire_grace_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            done.cancel()
            back.cancel()
        return _retiring(replica)

    async def _leaves(self, replica: Replica) -> bool:
        """Take it from the group once it is the last; False: it was wanted again."""
        replicas = self._group.replicas
        await self._group.changed.until(lambda: not _retiring(replica) or replicas[-1] is replica)
        if _retiring(replica):
            self._group.roster.remove(replica)
        return replica not in replicas


def _retiring(replica: Replica) -> bool:
    return Hold.RETIRING in replica.holds
