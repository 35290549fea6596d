"""Whether a router wants traffic. Asks the fleet and the text services; changes nothing.

A router that has not looked around yet would send everything to whom it met first. So it waits
until everybody who was listed at the start has said what he holds, or had his time. From then on
it is ready for good: that nobody serves a model is answered by each request, with a hint when to
come again, and routers that all leave their load balancer at once could not even say that.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from router.fleet.group import Group
from router.fleet.replica import SNAPSHOT_GRACE_S
from router.fleet.roster import Roster


class Lists(Protocol):
    """What lists members; `router.discovery.discovery.Discovery`."""

    @property
    def listed(self) -> bool:
        """Whether every source has listed once."""
        ...


class TextService(Protocol):
    """The instances of a text service; `router.text.pool.Pool`."""

    def __len__(self) -> int:
        """How many are known."""
        ...

    @property
    def connected(self) -> int:
        """How many are connected."""
        ...


class Readiness:
    """Not ready at first, then ready for good.

    Args:
        lists: Who lists members.
        groups: The fleet's.
        texts: Tokenizers and detokenizers: of each known service one must be connected.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        lists: Lists,
        groups: Roster,
        texts: Sequence[TextService],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lists = lists
        self._groups = groups
        self._texts = texts
        self._clock = clock
        self._ready = False
        self._awaited: list[Group] | None = None
        self._listed_at = 0.0

    def check(self) -> bool:
        """Return whether traffic is wanted now."""
        if not self._ready and self._lists.listed:
            self._ready = self._looked_around(self._clock())
        return self._ready

    def _looked_around(self, now: float) -> bool:
        if self._awaited is None:
            self._awaited, self._listed_at = list(self._groups), now
        self._awaited = [
            group
            for group in self._awaited
            if self._groups.find(group.group_id) is group and not group.settled(now)
        ]
        late = now - self._listed_at >= SNAPSHOT_GRACE_S
        heard = late or all(texts.connected or not len(texts) for texts in self._texts)
        return heard and not self._awaited
