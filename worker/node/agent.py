"""A further host of a group: comes to host 0, and runs its share of the ranks for it.

It decides nothing. While host 0 can't be reached it runs nothing and dials for ever.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import tenacity

from radixmesh.errors import InvalidRequest, LinkLost
from worker.node.host import Host
from worker.node.line import (
    BEAT_S,
    LOST_S,
    DumpShare,
    EndShare,
    Hello,
    Leaving,
    Line,
    MayLeave,
    Message,
    Refused,
    ShareEnded,
    ShareGone,
    ShareStarted,
    StartShare,
    Welcome,
)
from worker.node.share import Life, Share

logger = logging.getLogger(__name__)

BACKOFF_INITIAL_S = 0.2
BACKOFF_MAX_S = 2.0


class Agent:
    """Runs until it is cancelled; its ranks are gone then."""

    def __init__(
        self,
        host: Host,
        node_rank: int,
        settings: dict[str, str],
        *,
        beat_s: float = BEAT_S,
        lost_s: float = LOST_S,
    ) -> None:
        self._host = host
        self._hello = Hello(node_rank, settings)
        self._beat_s = beat_s
        self._lost_s = lost_s
        self._why = ""  # of the last dial that failed, said once
        self._resting = asyncio.Event()
        self._resting.set()
        self._line: Line | None = None  # while host 0 is there

    async def run(self, address: str, port: int) -> None:
        """Be of service to host 0 at this address.

        Raises:
            InvalidRequest: It was told something else of the group than this host.
        """
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type((OSError, LinkLost)),
            wait=tenacity.wait_exponential(multiplier=BACKOFF_INITIAL_S, max=BACKOFF_MAX_S),
        )
        async for attempt in attempts:
            with attempt:
                line = await self._come(address, port)
                attempt.retry_state.attempt_number = 1
                await self._serve(line)

    async def leave(self) -> None:
        """Tell host 0, and wait until it needs nothing of this host any more, or is lost."""
        if self._line is not None:
            self._line.send(Leaving())
        await self._resting.wait()

    async def _serve(self, line: Line) -> None:
        logger.info("of service to host 0", extra={"address": line.there})
        self._line = line
        try:
            await _Service(self._host, line, self._resting).run()
        except LinkLost as error:
            logger.error("host 0 lost", extra={"error": error.message})  # noqa: TRY400
            raise
        finally:
            self._line = None
            line.close()

    async def _come(self, address: str, port: int) -> Line:
        try:
            async with asyncio.timeout(self._lost_s):
                reader, writer = await asyncio.open_connection(address, port)
            line = Line(reader, writer, beat_s=self._beat_s, lost_s=self._lost_s)
            try:
                await self._greet(line)
            except BaseException:
                line.close()
                raise
        except (OSError, LinkLost) as error:
            if self._why != str(error):
                self._why = str(error)
                extra = {"address": f"{address}:{port}", "error": self._why}
                logger.info("host 0 is not there", extra=extra)
            raise
        self._why = ""
        return line

    async def _greet(self, line: Line) -> None:
        line.send(self._hello)
        answer = await line.receive()
        if isinstance(answer, Refused):
            if answer.forever:
                raise InvalidRequest(f"host 0 refuses this host: {answer.why}", field="node_rank")
            raise LinkLost(answer.why)
        if not isinstance(answer, Welcome):
            raise LinkLost("host 0 makes no sense")


class _Service:
    """What is run for host 0 while the line to it holds."""

    def __init__(self, host: Host, line: Line, resting: asyncio.Event) -> None:
        self._host = host
        self._line = line
        self._resting = resting
        self._shares: dict[int, asyncio.Task[Share]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the line is lost; then end all ranks. Raises LinkLost."""
        self._spawn(self._line.beat())
        try:
            while True:
                self._obey(await self._line.receive())
        finally:
            for task in (tasks := list(self._tasks)):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._end_all()

    def _obey(self, message: Message) -> None:
        match message:
            case StartShare():
                life = Life(
                    dp_rank=message.dp_rank,
                    incarnation=message.incarnation,
                    store_host=self._line.there,
                    store_port=message.store_port,
                )
                starting = self._host.start(life, address=self._line.here)
                share = asyncio.get_running_loop().create_task(starting)
                self._shares[message.incarnation] = share
                self._resting.clear()
                self._spawn(self._watch(message.incarnation, share))
            case DumpShare():
                self._spawn(self._dump(message.incarnation))
            case MayLeave():
                self._resting.set()
            case EndShare():
                self._spawn(self._end(message.incarnation, message.grace_s))
            case _:
                raise LinkLost("host 0 said what only further hosts say")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, incarnation: int, starting: asyncio.Task[Share]) -> None:
        try:
            share = await asyncio.shield(starting)
        except OSError as error:
            logger.exception("ranks could not be started", extra={"incarnation": incarnation})
            self._line.send(ShareStarted(incarnation, str(error) or "no process"))
            return
        self._line.send(ShareStarted(incarnation))
        how = await share.first_end()
        self._line.send(ShareEnded(incarnation, how, died=await share.died()))

    async def _dump(self, incarnation: int) -> None:
        if starting := self._shares.get(incarnation):
            (await asyncio.shield(starting)).dump()

    async def _end(self, incarnation: int, grace_s: float) -> None:
        if starting := self._shares.get(incarnation):
            await _end(starting, grace_s)
            self._shares.pop(incarnation, None)
        self._line.send(ShareGone(incarnation))
        if not self._shares:
            self._resting.set()

    async def _end_all(self) -> None:
        await asyncio.gather(*(_end(starting, 0) for starting in self._shares.values()))
        self._shares.clear()
        self._resting.set()


async def _end(starting: asyncio.Task[Share], grace_s: float) -> None:
    try:
        share = await asyncio.shield(starting)
    except OSError:
        return  # there were none
    await share.end(grace_s)
