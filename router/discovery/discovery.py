"""All sources of a router, running. Knows that each has listed; not what they list."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.discovery.member import Member, Source
from router.discovery.reconcile import Reconciler

logger = logging.getLogger(__name__)

PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Subscription:
    """A source, and where what it lists belongs."""

    source: Source
    reconciler: Reconciler[Any]


class Discovery:
    """Runs sources.

    Args:
        subscriptions: All of them.
    """

    def __init__(self, subscriptions: Sequence[Subscription]) -> None:
        self._subscriptions = subscriptions
        self._silent = {id(each) for each in subscriptions}

    def __repr__(self) -> str:
        silent = [each.source.name for each in self._subscriptions if id(each) in self._silent]
        return f"<Discovery of {len(self._subscriptions)} sources, silent: {silent}>"

    @property
    def listed(self) -> bool:
        """Whether every source has listed once."""
        return not self._silent

    async def run(self) -> None:
        """Run all sources until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._subscriptions:
                tasks.create_task(self._run(each))

    async def _run(self, one: Subscription) -> None:
        """Run one source; what is wrong with it ends nobody else."""

        def publish(members: Sequence[Member]) -> None:
            one.reconciler.publish(one.source.name, members)
            self._silent.discard(id(one))

        done = False
        while not done:
            try:
                await one.source.run(publish)
                done = True
            except Exception:
                logger.exception("a source failed", extra={"source": one.source.name})
                await asyncio.sleep(PAUSE_S)
