"""Keeps one replica alive: start its ranks, test them, watch them, start them anew.

Knows lives (one start of the ranks each) and the pace of restarts; knows neither how
processes are made (`node/launcher.py`) nor what requests are (`group.py`).
"""

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NoReturn, Protocol

import tenacity

from radixmesh.blocks import pack_ids
from radixmesh.errors import BY_REASON, Draining, GroupLost, MeshError, RankDesync
from worker.front.ask import Ask
from worker.front.group import Group
from worker.front.mailbox import Mailbox
from worker.front.plain_call import PlainCall
from worker.front.replica import Replica
from worker.group.launch import REFUSALS
from worker.request import Broken, Outbound, Ready, Sampling, StepOutput

logger = logging.getLogger(__name__)


class Ranks(Protocol):
    """Running rank processes of one replica."""

    mailbox: socket.socket

    async def first_end(self) -> str:
        """Wait until a rank ends; return which and how, for people."""
        ...

    async def died(self) -> bool:
        """Whether a rank has died, neither left nor stuck. Waits a moment for one that dies."""
        ...

    def dump(self) -> None:
        """Have every rank that still can write its stacks and its state to the log."""
        ...

    async def end(self, grace_s: float) -> None:
        """End and reap all; those that go by themselves within the grace are not killed."""
        ...


Launch = Callable[[int, int], Awaitable[Ranks]]  # (dp_rank, incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times of a supervisor, in seconds.

    Attributes:
        startup_s: Ranks that are not tested and ready after this are killed.
        backoff_initial_s: Pause before the first restart; it doubles.
        backoff_max_s: The longest pause.
        healthy_s: A replica that was up for so long was healthy: the next pause is the
            first again.
        max_failures: After so many lives in a row that were not healthy, of every replica,
            the group ends; 0 means never.
        last_words_s: After a death, how long to wait for what explains it.
        dump_s: How long ranks that are left after a loss get to write their stacks to the log.
        stop_grace_s: Ranks that are told to stop are killed after this.
    """

    startup_s: float = 600.0
    backoff_initial_s: float = 0.2
    backoff_max_s: float = 10.0
    healthy_s: float = 120.0
    max_failures: int = 0
    last_words_s: float = 0.2
    dump_s: float = 0.5
    stop_grace_s: float = 5.0


class ReplicaLost(Exception):
    """A life ended by a failure."""


class GroupEnded(Exception):
    """The group cannot work; its front says why and exits with `exit_status`."""

    exit_status: ClassVar[int] = 1


class CannotStart(GroupEnded):
    """The ranks refuse what they are told to be, and starting them again would change nothing."""

    exit_status = 2


class KeepsFailing(GroupEnded):
    """Every replica has failed again and again, and none was healthy in between."""


class Supervisor:
    """Runs a replica for ever. Cancel `run` to stop it; its ranks are gone when that returns."""

    def __init__(self, replica: Replica, group: Group, launch: Launch, pace: Pace) -> None:
        self._replica = replica
        self._group = group
        self._launch = launch
        self._pace = pace
        # Not seeded: an incarnation must not come twice, not even after a restart of the front.
        self._random = random.SystemRandom()

    async def run(self) -> None:
        """Start the replica, again and again.

        Raises:
            CannotStart: Its ranks refused their configuration, and none of the group was ever
                ready with it.
            KeepsFailing: It failed `max_failures` times in a row, and so did all its siblings.
                While one of them may still be well, it is tried again for ever.
        """
        pace = self._pace
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(ReplicaLost),
            wait=tenacity.wait_exponential(
                multiplier=pace.backoff_initial_s, max=pace.backoff_max_s
            ),
        )
        self._replica.failures = 0
        async for attempt in attempts:
            with attempt:
                error, healthy = await self._live()
                failures = 1 if healthy else self._replica.failures + 1
                # The pause follows from it.
                self._replica.failures = attempt.retry_state.attempt_number = failures
                self._judge(error)

    def _judge(self, error: MeshError) -> NoReturn:
        replica, pace = self._replica, self._pace
        if isinstance(error, REFUSALS) and not self._group.description.known:
            raise CannotStart(error.message)
        extra = {"dp_rank": replica.dp_rank, "reason": error.reason, "error": error.message}
        logger.error("replica lost", extra={**extra, "failures": replica.failures})
        if pace.max_failures and self._group.roster.failing(pace.max_failures):
            raise KeepsFailing(
                f"the ranks failed {replica.failures} times in a row: {error.message}"
            )
        raise ReplicaLost

    async def _live(self) -> tuple[MeshError, bool]:
        """Live once; return what ended it, and whether it was healthy before."""
        replica = self._replica
        incarnation = self._random.getrandbits(64) or 1
        try:
            ranks = await self._launch(replica.dp_rank, incarnation)
        except OSError as fault:
            logger.exception("ranks could not be started", extra={"dp_rank": replica.dp_rank})
            return GroupLost(f"the ranks could not be started: {fault}"), False
        life = _Life(replica, self._group, ranks, self._pace)
        # Unless it is lost, it was told to stop, and nobody's request is to blame for that.
        error: MeshError = Draining("the replica is stopping")
        grace_s = self._pace.stop_grace_s
        try:
            error = await life.run(incarnation)
            # What told of the loss may be a rank that waited in vain for a stuck one. First
            # of all: those that only wait would end with the socket. A refusal says all, and
            # so does a death.
            if not (isinstance(error, REFUSALS) or (life.ended and await ranks.died())):
                ranks.dump()
            grace_s = self._pace.dump_s
        finally:
            life.close()
            self._group.on_down(replica, error)
            await ranks.end(grace_s)
        return error, life.up_s > self._pace.healthy_s


class _Life:
    """One incarnation of a replica."""

    def __init__(self, replica: Replica, group: Group, ranks: Ranks, pace: Pace) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._replica = replica
        self._group = group
        self._ranks = ranks
        self._pace = pace
        self._ready: asyncio.Future[Ready] = loop.create_future()
        self._lost: asyncio.Future[MeshError] = loop.create_future()
        self._silent = asyncio.Event()  # the mailbox has ended
        self._up_at: float | None = None
        self.ended = False  # whether the end of a process seems to explain the loss
        self._mailbox = Mailbox(self._on_message, self._on_mailbox_lost)

    async def run(self, incarnation: int) -> MeshError:
        """Live; return what ended it."""
        await self._mailbox.connect(self._ranks.mailbox)
        self._replica.begin(incarnation, self._mailbox, self._lose)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self._watch())
            try:
                await self._start()
                return await self._lost
            finally:
                watch.cancel()

    @property
    def up_s(self) -> float:
        """How long it has been up; 0 when it never was."""
        return 0.0 if self._up_at is None else self._loop.time() - self._up_at

    def close(self) -> None:
        """Tell the ranks to stop, and hear no more of them."""
        self._mailbox.close()

    def _lose(self, error: MeshError, *, ended: bool = False) -> None:
        if not self._lost.done():
            self.ended = ended
            self._lost.set_result(error)

    async def _watch(self) -> None:
        how = await self._ranks.first_end()
        # What it sent before it died is still to be read: tokens, or why it broke.
        try:
            async with asyncio.timeout(self._pace.last_words_s):
                await self._silent.wait()
        except TimeoutError:
            pass
        self._lose(GroupLost(how), ended=True)

    async def _start(self) -> None:
        began = self._loop.time()
        starting = asyncio.ensure_future(self._test())
        try:
            await asyncio.wait(
                (starting, self._lost),
                timeout=self._pace.startup_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not starting.done():
                self._lose(GroupLost(f"the ranks were not ready in {self._pace.startup_s:.0f} s"))
            elif error := starting.exception():
                self._lose(GroupLost(f"the self-test failed: {error}"))
            if self._lost.done():
                return
        finally:
            starting.cancel()
        logger.debug("replica tested", extra={"seconds": self._loop.time() - began})
        self._up_at = self._loop.time()
        self._group.on_up(self._replica)

    async def _test(self) -> None:
        """Run one request through the ranks and back. Raises MeshError."""
        ready = await self._ready
        extra = {"dp_rank": self._replica.dp_rank, "startup_s": round(ready.startup_s, 3)}
        logger.info("ranks ready", extra=extra)
        self._group.description.learn(ready)
        await self._group.operation.prepare(self._replica)
        ask = Ask(
            prompt=pack_ids([0]),
            sampling=Sampling(seed=0, temperature=0.0, max_tokens=2, ignore_eos=True),
            cache_salt="self-test",
        )
        call = PlainCall()
        self._group.submit_test(call, ask, self._replica)
        async for _ in call.pieces():
            pass

    def _on_message(self, message: Outbound) -> None:
        if isinstance(message, StepOutput):
            self._group.on_output(self._replica, message)
        elif isinstance(message, Ready):
            if not self._ready.done():
                self._ready.set_result(message)
        else:
            self._lose(self._meaning(message), ended=message.ended)

    def _meaning(self, broken: Broken) -> MeshError:
        kind = BY_REASON.get(broken.reason, GroupLost)
        if issubclass(kind, RankDesync) or (issubclass(kind, REFUSALS) and not self._ready.done()):
            return kind(broken.message)
        # For a request, any other end of its replica is a loss that it can resume after.
        return GroupLost(broken.message)

    def _on_mailbox_lost(self, reason: str) -> None:
        self._silent.set()
        # The exit that follows says more; without one, this is all there is to say.
        lose = partial(self._lose, GroupLost(reason), ended=True)
        self._loop.call_later(self._pace.last_words_s, lose)
