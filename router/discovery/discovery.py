"""All sources of a router, running. Knows that each has listed; not what they list."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.discovery.member import Member, Publish, Source
from router.discovery.reconcile import Reconciler

logger = logging.getLogger(__name__)

PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Static:
    """Members that a flag names: listed once, for good."""

    name: str
    members: Sequence[Member]

    async def run(self, publish: Publish) -> None:
        """Publish them."""
        publish(self.members)


@dataclass(frozen=True, slots=True)
class Feeds:
    """A source, and where what it lists belongs."""

    source: Source
    reconciler: Reconciler[Any]


class Discovery:
    """Runs sources.

    Args:
        feeds: All of them.
    """

    def __init__(self, feeds: Sequence[Feeds]) -> None:
        self._feeds = feeds
        self._silent = {id(each) for each in feeds}

    def __repr__(self) -> str:
        silent = [each.source.name for each in self._feeds if id(each) in self._silent]
        return f"<Discovery of {len(self._feeds)} sources, silent: {silent}>"

    @property
    def listed(self) -> bool:
        """Whether every source has listed once."""
        return not self._silent

    async def run(self) -> None:
        """Run all sources until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._feeds:
                tasks.create_task(self._run(each))

    async def _run(self, feeds: Feeds) -> None:
        """Run one source; what is wrong with it ends nobody else."""

        def publish(members: Sequence[Member]) -> None:
            feeds.reconciler.publish(feeds.source.name, members)
            self._silent.discard(id(feeds))

        done = False
        while not done:
            try:
                await feeds.source.run(publish)
                done = True
            except Exception:
                logger.exception("a source failed", extra={"source": feeds.source.name})
                await asyncio.sleep(PAUSE_S)
