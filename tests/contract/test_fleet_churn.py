"""Groups that come, go or never answer, over real links: nothing of them stays."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import grpc.aio
import psutil
import pytest

from radixmesh.rpc.link import Link
from router.fleet.group import Group
from router.fleet.registry import Fleet
from router.fleet.replica import Replica
from router.fleet.worker_link import WorkerLink
from tests.fakes.fleet import Output, ask, count_ready, running_fleet, spec, until
from tests.fakes.worker import FakeWorker

KINDS = (Group, Replica, WorkerLink, Link, grpc.aio.Channel, asyncio.Task)
WARM_UP, ROUNDS = 5, 40
FDS_SLACK = 4  # a connection may be half closed when it is counted


def alive() -> dict[str, int]:
    """How many objects there are of each kind that a group brings."""
    gc.collect()
    found = gc.get_objects()
    # By type: to ask an object for its class runs code of objects that are not ours.
    return {kind.__name__: sum(issubclass(type(one), kind) for one in found) for kind in KINDS}


def held() -> int:
    return psutil.Process().num_fds()


async def eventually(condition: Callable[[], bool], says: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(5):
            while not condition():  # noqa: ASYNC110 - objects tell nobody
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(says()) from None


async def come_and_go(fleet: Fleet, workers: list[FakeWorker]) -> None:
    """All join, are known with their caches, do something, and leave."""
    for worker in workers:
        fleet.add_group(worker.address)
    await until(fleet, lambda: count_ready(fleet) == 2 * len(workers))
    for worker in workers:
        prompt = range(1_000, 1_020)
        output = Output()
        booking = fleet.place(ask(prompt, model=worker.shape.model))
        fleet.submit(booking, spec(prompt), output)
        await output.ended()
        fleet.remove_group(worker.address)
    # The keys go once the links have ended.
    tree = fleet.tree
    await eventually(lambda: tree.sweep(100_000) and not len(tree), lambda: tree)


@pytest.mark.timeout(60)
async def test_models_and_groups_that_come_and_go_leave_nothing() -> None:
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(FakeWorker(model=f"m{number}", dp=2))
            for number in range(2)
        ]
        for worker in workers:
            worker.warm(0, range(4_000))
        fleet = await stack.enter_async_context(running_fleet())
        for _ in range(WARM_UP):
            await come_and_go(fleet, workers)
        before, fds = alive(), held()
        for _ in range(ROUNDS):
            await come_and_go(fleet, workers)
        assert fleet.models() == []
        # The last links may still be ending.
        await eventually(lambda: alive() == before, lambda: (before, alive()))
        await eventually(lambda: held() <= fds + FDS_SLACK, lambda: (fds, held()))


class Listener(asyncio.Protocol):
    """One connection, of which nothing is answered."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None


@asynccontextmanager
async def listening() -> AsyncGenerator[tuple[int, list[Listener]]]:
    """A port that takes connections and never says a word, and all connections so far."""
    made: list[Listener] = []

    def take() -> Listener:
        made.append(Listener())
        return made[-1]

    server = await asyncio.get_running_loop().create_server(take, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], made
    for one in made:
        if one.transport is not None:
            one.transport.abort()
    await eventually(lambda: all(one.transport is None for one in made), lambda: made)


async def test_addresses_that_never_answer_are_dialled_again_and_cost_no_more_each_time() -> None:
    async with listening() as (port, dials), running_fleet(f"127.0.0.1:{port}", "127.0.0.1:1"):
        await eventually(lambda: len(dials) >= 3, lambda: dials)
        before = alive()
        most = dict(before)
        began = len(dials)
        while len(dials) < began + 6:
            await asyncio.sleep(0.05)  # to look at it at many moments
            most = {name: max(most[name], count) for name, count in alive().items()}
        grown = {name: (count, most[name]) for name, count in before.items()}
        assert all(after <= count + 3 for count, after in grown.values()), grown
