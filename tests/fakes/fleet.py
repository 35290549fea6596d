"""A fleet on real links, and a sink that remembers, for tests of the router."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from random import Random

from radixmesh.blocks import pack_ids, unpack_ids
from radixmesh.errors import MeshError
from radixmesh.rpc.link import Identity
from router.fleet.ask import Ask, SubmitSpec
from router.fleet.registry import Fleet
from router.fleet.worker_link import WorkerLink
from router.policy.choice import Policy
from router.policy.price import Price
from router.request import Sampling
from tests.fakes.worker import FAST

PATIENCE_S = 10.0


class Output:
    """A WorkerSink that remembers."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.accepted = 0
        self.cached_tokens: int | None = None
        self.finish = 0
        self.error: MeshError | None = None
        self.ends = 0
        self._changed = asyncio.Event()

    def on_accepted(self) -> None:
        self.accepted += 1
        self._changed.set()

    def on_started(self, cached_tokens: int, waited_s: float, /) -> None:
        self.cached_tokens = cached_tokens
        self._changed.set()

    def on_tokens(
        self, position: int, ids: bytes, logprobs: Sequence[float], finish: int, /
    ) -> None:
        if position != len(self.ids):
            raise ValueError(f"ids at {position}, expected {len(self.ids)}")
        self.ids.extend(unpack_ids(ids))
        self.finish = finish
        self.ends += bool(finish)
        self._changed.set()

    def on_failed(self, error: MeshError, /) -> None:
        self.error = error
        self.ends += 1
        self._changed.set()

    async def until(self, ready: Callable[["Output"], bool]) -> None:
        """Wait until what came satisfies `ready`."""
        async with asyncio.timeout(PATIENCE_S):
            while not ready(self):
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> None:
        """Wait until it finished or failed."""
        await self.until(lambda output: output.ends > 0)


@asynccontextmanager
async def running_fleet(
    *addresses: str, policy: Policy | None = None, ready: int = 0
) -> AsyncGenerator[Fleet]:
    """A fleet of these groups, named by their addresses; waits for `ready` ready replicas."""
    fleet = Fleet(
        policy=policy or Price(),
        connect=partial(WorkerLink, identity=Identity("router", "router-1"), limits=FAST),
        rng=Random(7),
    )
    for address in addresses:
        fleet.add_group(address)
    task = asyncio.get_running_loop().create_task(fleet.run())
    try:
        await until(fleet, lambda: count_ready(fleet) >= ready)
        yield fleet
    finally:
        task.cancel()
        await asyncio.wait([task])


def count_ready(fleet: Fleet) -> int:
    """Replicas that get requests, of all models."""
    return sum(model.ready_replicas for model in fleet.models())


async def until(fleet: Fleet, ready: Callable[[], bool]) -> None:
    """Wait until the fleet satisfies `ready`, looking after each change."""
    async with asyncio.timeout(PATIENCE_S):
        while not ready():
            await fleet.changed()


def ask(prompt: Sequence[int], *, model: str = "tiny", salt: str = "", adapter: str = "") -> Ask:
    """An ask for a prompt and 8 ids."""
    return Ask(
        model=model,
        ids=pack_ids(prompt),
        fingerprint="",
        max_tokens=8,
        cache_salt=salt,
        adapter=adapter,
    )


def spec(prompt: Sequence[int], *, max_tokens: int = 8, salt: str = "") -> SubmitSpec:
    """One output of a prompt."""
    sampling = Sampling(seed=1, max_tokens=max_tokens)
    return SubmitSpec(prompt_ids=pack_ids(prompt), sampling=sampling, cache_salt=salt)
