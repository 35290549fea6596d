"""Feeds that say what can't be: the view is dropped, the link stays, a new snapshot repairs it."""

from collections.abc import Callable

import pytest

from radixmesh.rpc.link import Lane
from radixmesh.worker.v1 import feed_pb2
from radixmesh.worker.v1.worker_service_pb2 import AttachResponse
from router.policy.choice import View
from tests.fakes.fleet import Output, ask, running_fleet, spec, until
from tests.fakes.worker import FakeWorker

PROMPT = list(range(100, 134))  # 8 blocks, and a beginning of one
NEVER = 12345


def event(worker: FakeWorker) -> feed_pb2.CacheEvent:
    """The next one, of nothing yet."""
    return worker.replicas[0].cache._event()


def frame(event: feed_pb2.CacheEvent) -> AttachResponse:
    return AttachResponse(events=[event])


def below_nobody(worker: FakeWorker) -> AttachResponse:
    said = event(worker)
    said.stored.parent_key = NEVER
    said.stored.keys.extend([1, 2])
    return frame(said)


def without_key(worker: FakeWorker) -> AttachResponse:
    said = event(worker)
    said.stored.keys.extend([1, 0, 2])
    return frame(said)


def stored_twice(worker: FakeWorker) -> AttachResponse:
    said = event(worker)
    said.stored.keys.extend([*worker.replicas[0].cache.keys][:1])
    return frame(said)


def removed_what_was_not_there(worker: FakeWorker) -> AttachResponse:
    said = event(worker)
    said.removed.keys.append(NEVER)
    return frame(said)


def of_no_known_kind(worker: FakeWorker) -> AttachResponse:
    return frame(event(worker))


def snapshot(worker: FakeWorker, keys: list[int], parents: list[int]) -> AttachResponse:
    cache = worker.replicas[0].cache
    chunk = feed_pb2.SnapshotChunk(
        incarnation=cache.incarnation,
        as_of_sequence=cache.sequence,
        first=True,
        last=True,
        keys=keys,
        parents=parents,
    )
    return AttachResponse(snapshots=[chunk])


def with_columns_that_differ(worker: FakeWorker) -> AttachResponse:
    return snapshot(worker, [1, 2, 3], [0])


def children_first(worker: FakeWorker) -> AttachResponse:
    return snapshot(worker, [2, 1], [1, 0])


@pytest.mark.parametrize(
    "say",
    [
        below_nobody,
        without_key,
        stored_twice,
        removed_what_was_not_there,
        of_no_known_kind,
        with_columns_that_differ,
        children_first,
    ],
)
async def test_what_cannot_be_costs_the_view_and_nothing_else(
    say: Callable[[FakeWorker], AttachResponse],
) -> None:
    async with FakeWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        worker.paused = True
        keys = set(worker.warm(0, PROMPT))
        number = next(iter(fleet.groups)).replicas[0].feed.number
        await until(fleet, lambda: fleet.tree.keys_of(number) == keys)
        output = Output()
        fleet.submit(fleet.place(ask(PROMPT)), spec(PROMPT), output)
        await output.until(lambda output: output.accepted > 0)
        [handler] = worker._handlers
        handler.session.send(say(worker), Lane.FEED)
        seen: set[View] = set()

        def repaired() -> bool:
            seen.add(fleet.replicas()[0].view)
            known = fleet.tree.keys_of(number)
            assert not known & {NEVER, 1, 2, 3, 0}
            return worker.resnapshots > 0 and known == keys

        await until(fleet, repaired)
        assert View.DEGRADED in seen
        assert fleet.replicas()[0].view is View.EXACT
        # It is the same link: what ran there goes on.
        assert worker._handlers == [handler]
        worker.paused = False
        worker._work.set()
        await output.ended()
        assert len(output.ids) == 8
