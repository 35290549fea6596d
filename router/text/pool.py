"""A pool of instances of one text service: which of them can be asked now.

Knows who is connected, what each serves and how busy it is; nothing of ids and
text. What an instance serves is learned from the first frame of its link.
"""

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from radixmesh.errors import MeshError, ServiceUnavailable, TokenizerMismatch

LEAVE_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class Serving:
    """What an instance has loaded: a model's tokenizer, known by the hash of its file."""

    model: str
    fingerprint: str


class OnChange(Protocol):
    """Told that an instance came up or was lost."""

    def __call__(self, *, up: bool) -> None:
        """It can be asked now, or can't any more."""


class Instance(Protocol):
    """One service process behind a link."""

    @property
    def address(self) -> str:
        """Where it is, for messages."""

    @property
    def serving(self) -> Serving | None:
        """What it serves, or None while it is not connected."""

    @property
    def load(self) -> int:
        """How many entries it has of this router."""

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes."""

    @property
    def shunned(self) -> bool:
        """Whether others are to be asked first."""

    on_change: OnChange

    async def run(self) -> None:
        """Keep the link up until cancelled."""


InstanceT = TypeVar("InstanceT", bound=Instance)


class Pool(Generic[InstanceT]):
    """Instances of one service; the least loaded that fits is chosen, ties at random.

    Args:
        service: `tokenizer` or `detokenizer`, for messages.
        rng: Breaks ties.
        on_lost: Told of every instance that was lost.
    """

    def __init__(self, service: str, *, rng: random.Random, on_lost: Callable[[], None]) -> None:
        self._service = service
        self._rng = rng
        self._on_lost = on_lost
        self._instances: list[InstanceT] = []
        self._drained: set[InstanceT] = set()
        self._leaving: set[InstanceT] = set()
        self._somebody_leaves = asyncio.Event()
        self._tasks: asyncio.TaskGroup | None = None
        self._runs: dict[InstanceT, asyncio.Task[None]] = {}
        self._waiters: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._instances)

    def __contains__(self, instance: object) -> bool:
        return any(one is instance for one in self._instances)

    def add(self, instance: InstanceT) -> None:
        """Add an instance."""
        instance.on_change = self._changed
        self._instances.append(instance)
        self._run(instance)

    def at(self, address: str) -> InstanceT | None:
        """Return who is at an address."""
        return next((one for one in self._instances if one.address == address), None)

    def drain(self, instance: InstanceT) -> None:
        """Ask an instance nothing new, as long as there is another."""
        self._drained.add(instance)

    def undrain(self, instance: InstanceT) -> None:
        """Ask it again; it stays."""
        self._drained.discard(instance)
        self._leaving.discard(instance)

    def retire(self, instance: InstanceT) -> None:
        """Ask an instance nothing new; it leaves when it has no entry."""
        if not instance.load:
            self.remove(instance)
            return
        self.drain(instance)
        self._leaving.add(instance)
        self._somebody_leaves.set()

    def leaves(self, instance: InstanceT) -> bool:
        """Whether it is to leave."""
        return instance in self._leaving

    def remove(self, instance: InstanceT) -> None:
        """Take an instance out; its entries fail with LinkLost. Idempotent."""
        if instance in self:
            self._instances.remove(instance)
        self.undrain(instance)
        run = self._runs.pop(instance, None)
        if run is not None:
            run.cancel()

    @property
    def connected(self) -> int:
        """How many are connected."""
        return sum(1 for one in self._instances if one.serving)

    @property
    def entries(self) -> int:
        """Entries that are open, at all of them."""
        return sum(one.load for one in self._instances)

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes, to all of them."""
        return sum(one.pending_bytes for one in self._instances)

    async def run(self) -> None:
        """Keep the links up until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for instance in self._instances:
                    self._run(instance)
                while True:
                    await self._somebody_leaves.wait()
                    self._let_go()
                    await asyncio.sleep(LEAVE_TICK_S)
        finally:
            self._tasks = None
            self._runs.clear()

    def _run(self, instance: InstanceT) -> None:
        if self._tasks is not None:
            self._runs[instance] = self._tasks.create_task(instance.run())

    def _let_go(self) -> None:
        """Remove those that are to leave and have nothing any more."""
        for instance in [one for one in self._leaving if not one.load]:
            self.remove(instance)
        if not self._leaving:
            self._somebody_leaves.clear()

    def _changed(self, *, up: bool) -> None:
        if not up:
            self._on_lost()
            return
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def choose(self, wanted: Serving, *, avoid: Collection[InstanceT] = ()) -> InstanceT | None:
        """Return the least loaded connected instance that fits, or None.

        Args:
            wanted: A fingerprint to match, or, where it is empty, a model.
            avoid: Instances to pass over, unless there is no other.

        Raises:
            TokenizerMismatch: Instances of this model are connected; none fits.
        """
        serving = [one for one in self._instances if one.serving is not None]
        fitting = [one for one in serving if _fits(one.serving, wanted)]
        if not fitting:
            self._refuse_mismatch(serving, wanted)
            return None
        wanted_ones = [one for one in fitting if one not in self._drained] or fitting
        allowed = [one for one in wanted_ones if one not in avoid] or wanted_ones
        allowed = [one for one in allowed if not one.shunned] or allowed
        least = min(one.load for one in allowed)
        return self._rng.choice([one for one in allowed if one.load == least])

    def _refuse_mismatch(self, serving: Sequence[InstanceT], wanted: Serving) -> None:
        for one in serving:
            if one.serving is not None and one.serving.model == wanted.model:
                raise TokenizerMismatch(
                    f"{self._service} {one.address} loads another tokenizer than the workers",
                    here=one.serving.fingerprint,
                    there=wanted.fingerprint,
                )

    async def acquire(
        self, wanted: Serving, *, wait_s: float, avoid: Collection[InstanceT] = ()
    ) -> InstanceT:
        """Return an instance that fits, waiting for one to connect.

        Raises:
            ServiceUnavailable: None connected within `wait_s`.
            TokenizerMismatch: Only instances with another tokenizer did.
        """
        mismatch: MeshError | None = None
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    try:
                        chosen = self.choose(wanted, avoid=avoid)
                    except TokenizerMismatch as error:
                        # One that fits may connect within the wait.
                        mismatch, chosen = error, None
                    if chosen is not None:
                        return chosen
                    await self._next_change()
        except TimeoutError:
            raise mismatch or ServiceUnavailable(
                f"no {self._service} is reachable", model=wanted.model
            ) from None

    async def _next_change(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)


def _fits(serving: Serving | None, wanted: Serving) -> bool:
    if serving is None:
        return False
    if wanted.fingerprint:
        return serving.fingerprint == wanted.fingerprint
    return serving.model == wanted.model
