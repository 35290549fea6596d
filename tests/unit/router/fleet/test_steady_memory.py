"""A request leaves nothing behind, however many there are: what is kept is bounded."""

import gc
import tracemalloc
from collections import deque
from collections.abc import Callable

import pytest

from radixmesh.blocks import Namespace, block_keys, pack_ids
from radixmesh.errors import GroupLost
from router.fleet.ask import Ask
from router.fleet.changes import Change, Digest, Removed, Stored
from router.fleet.workload import Report
from router.policy.choice import View
from router.policy.policies import POLICIES
from tests.fakes.fleet import Output, spec
from tests.fakes.group_link import FakeFleet

SEED = Namespace(model="tiny", fingerprint="f1").seed()
CACHE = 20  # prompts that a replica holds
FIRST, REST = 500, 1_000
SLACK_BYTES = 24 * 1024


class Life:
    """Four replicas whose caches are full, and clients that never say the same twice."""

    def __init__(self, policy: str) -> None:
        self.fake = FakeFleet("a", policy=POLICIES[policy]())
        self.link = self.fake.links["a"]
        self.link.up(dp=4)
        self.number = 0
        self._cached: list[deque[list[int]]] = [deque() for _ in range(4)]
        self._told = [0] * 4

    def _tell(self, rank: int, change: Change) -> None:
        self._told[rank] += 1
        self.link.events.on_change(rank, 1, self._told[rank], change)

    def request(self, end: str) -> None:
        """One request with a prompt, a session and a salt of its own."""
        self.number += 1
        self.fake.clock.advance(0.01)
        ids = [self.number, *range(40)]
        asked = Ask(
            model="tiny",
            ids=pack_ids(ids),
            fingerprint="f1",
            max_tokens=8,
            session=f"session {self.number}",
        )
        booking = self.fake.fleet.place(asked)
        self.fake.fleet.submit(booking, spec(ids), Output())
        [entry] = self.link.entries.values()
        if end == "cancelled":
            self.link.cancel(entry)
        elif end == "failed":
            self.link.fail(entry, GroupLost("a rank died"))
        else:
            entry.on_started(0, 0.0)
            self._cache(booking.dp_rank, ids)
            self.link.finish(entry)
        report = Report(free_blocks=4096, running=self.number % 3)
        self.link.events.on_report(booking.dp_rank, 1, report)
        if self.number % 50 == 0:
            self._prove()

    def _prove(self) -> None:
        tree = self.fake.fleet.tree
        for view in self.fake.fleet.replicas():
            number = self.fake.fleet.groups.get("a").replicas[view.dp_rank].feed.number
            proof = Digest(self._told[view.dp_rank], *tree.digest(number))
            self.link.events.on_digest(view.dp_rank, 1, proof)
            assert view.view is View.EXACT
        self.fake.fleet.tick()

    def _cache(self, rank: int, ids: list[int]) -> None:
        keys = block_keys(pack_ids(ids), block_tokens=4, seed=SEED)
        self._tell(rank, Stored(0, keys))
        self._cached[rank].append(keys)
        if len(self._cached[rank]) > CACHE:
            self._tell(rank, Removed(list(reversed(self._cached[rank].popleft()))))


def growth(act: Callable[[], None]) -> int:
    """Bytes by which all that is alive grows over many rounds, after others."""
    tracemalloc.start()
    try:
        for _ in range(FIRST):
            act()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(REST):
            act()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["price", "cache_aware", "consistent_hash"])
def test_requests_that_finish_leave_nothing(policy: str) -> None:
    life = Life(policy)
    assert growth(lambda: life.request("finished")) < SLACK_BYTES
    fleet = life.fake.fleet
    assert fleet.tree.marked_count == 0
    assert sum(view.in_flight for view in fleet.replicas()) == 0
    assert len(fleet.tree) == sum(len(keys) for cached in life._cached for keys in cached)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("end", ["cancelled", "failed"])
def test_requests_that_end_otherwise_leave_nothing(end: str) -> None:
    life = Life("price")
    assert growth(lambda: life.request(end)) < SLACK_BYTES
    assert life.fake.fleet.tree.marked_count == 0
