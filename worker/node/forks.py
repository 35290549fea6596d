"""The asyncio side of a fork server: have ranks started, hear how they end, kill them.

Knows processes and descriptors; knows neither replicas nor when to start again.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from radixmesh.settings import child_environment
from worker.config import RankConfig
from worker.group.framing import HEADER, FrameSplitter, FramingError
from worker.group.launch import (
    LOST,
    Ended,
    Kill,
    Start,
    Started,
    decode_answer,
    descriptors,
)
from worker.group.topology import Place

logger = logging.getLogger(__name__)

# A fork server that answers nothing for so long is stuck.
ANSWER_S = 10.0
# Unless it has not answered yet: it imports all that ranks need before that.
FIRST_ANSWER_S = 600.0
# Until its socket has room again.
BUSY_S = 0.001
_RECEIVE_BYTES = 1 << 16
# torch's threads meet many times in a step. By default one that waits spins for milliseconds:
# where others use the cores too, it takes them from the thread that it waits for, and a step
# of 0.1 s takes 2 s. So many turns are some tens of microseconds, which costs nothing else.
PATIENCE = {"GOMP_SPINCOUNT": "10000"}


@dataclass(eq=False, slots=True)
class RankProcess:
    """A rank, from the order to start it on. `pid` is 0 until it runs."""

    number: int
    place: Place
    started: asyncio.Future[int]
    ended: asyncio.Future[int]
    pid: int = field(default=0)

    def describe_end(self) -> str:
        """Say how it ended, for people."""
        if not self.ended.done():
            return f"rank {self.place} runs"
        status = self.ended.result()
        if status == LOST:
            return f"rank {self.place} was lost with its fork server"
        if status < 0:
            name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
            return f"rank {self.place} was killed by {name}"
        return f"rank {self.place} exited with status {status}"


class ForkServer:
    """A running fork server. When it dies, its ranks die too; `alive` tells."""

    def __init__(
        self, process: asyncio.subprocess.Process, sock: socket.socket, first_answer_s: float
    ) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        self._sock = sock
        self._answer_s = first_answer_s
        self._ranks: dict[int, RankProcess] = {}
        self._number = 0
        self._orders: asyncio.Queue[tuple[Start | Kill, list[int]]] = asyncio.Queue()
        self._reader = loop.create_task(self._listen())
        self._writer = loop.create_task(self._speak())

    def __repr__(self) -> str:
        return f"<ForkServer {self._process.pid} of {len(self._ranks)} ranks>"

    @classmethod
    async def start(cls, base: RankConfig, first_answer_s: float = FIRST_ANSWER_S) -> "ForkServer":
        """Start one that has imported, before it forks, what ranks with such a configuration need.

        One that gives its first answer after more than `first_answer_s` is killed.

        Raises:
            OSError: There can be no process.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "worker.group.forkserver"),
                    *(str(theirs.fileno()), msgspec.json.encode(base).decode()),
                    stdin=asyncio.subprocess.DEVNULL,
                    # numpy's own threads would be in the way of forking; torch's are others.
                    env=child_environment(PATIENCE, OPENBLAS_NUM_THREADS="1"),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return cls(process, ours, first_answer_s)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still start ranks."""
        return not self._reader.done()

    def fork(self, config: RankConfig) -> RankProcess:
        """Order a rank; the descriptors that `config` names stay the caller's.

        When the fork server is gone, the rank has ended as LOST.
        """
        loop = asyncio.get_running_loop()
        place = Place(config.dp_rank, config.pp_rank, config.tp_rank)
        self._number += 1
        rank = RankProcess(self._number, place, loop.create_future(), loop.create_future())
        self._ranks[rank.number] = rank
        if self.alive:
            # The caller may close its own before these have been sent.
            fds = [os.dup(fd) for fd in descriptors(config)]
            self._orders.put_nowait((Start(rank.number, config), fds))
        else:
            self._lose_all()
        return rank

    async def begun(self, rank: RankProcess) -> None:
        """Wait until a rank runs or has ended; whatever the fork server does, one of both comes."""
        told = (rank.started, rank.ended)
        done, _ = await asyncio.wait(
            told, timeout=self._answer_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            self._give_up()
            await asyncio.wait(told, return_when=asyncio.FIRST_COMPLETED)

    def signal(self, ranks: Sequence[RankProcess], number: int) -> None:
        """Send ranks a signal that does not end them; those that have ended are left out."""
        for rank in ranks:
            if not rank.ended.done():
                self._orders.put_nowait((Kill(rank.number, number), []))

    async def kill(self, ranks: Sequence[RankProcess]) -> None:
        """Kill ranks and wait until they are reaped."""
        left = [rank for rank in ranks if not rank.ended.done()]
        for rank in left:
            self._orders.put_nowait((Kill(rank.number), []))
        if not left:
            return
        _, stuck = await asyncio.wait([rank.ended for rank in left], timeout=ANSWER_S)
        if stuck:
            self._give_up()
            await asyncio.wait(stuck)

    async def close(self) -> None:
        """End it; ranks that are left are killed. It is reaped."""
        for task in (self._reader, self._writer):
            task.cancel()
        await asyncio.wait([self._reader, self._writer])
        self._sock.close()
        self._lose_all()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _speak(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            order, fds = await self._orders.get()
            body = msgspec.json.encode(order)
            try:
                await self._send_header(HEADER.pack(len(body)), fds)
                await loop.sock_sendall(self._sock, body)
            except OSError:
                return  # the reader sees the end too, and says what is lost
            finally:
                for fd in fds:
                    os.close(fd)

    async def _send_header(self, header: bytes, fds: list[int]) -> None:
        # Few bytes go whole or not at all, and the descriptors with them.
        while True:
            try:
                socket.send_fds(self._sock, [header], fds)
            except BlockingIOError:
                await asyncio.sleep(BUSY_S)
            else:
                return

    async def _listen(self) -> None:
        try:
            async for answer in self._answers():
                self._take(answer)
        except (OSError, FramingError, msgspec.MsgspecError) as error:
            logger.exception("fork server lost", extra={"error": str(error)})
        self._lose_all()
        # Also one that talks nonsense: its ranks must not outlive what is known of them.
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _take(self, answer: Started | Ended) -> None:
        self._answer_s = ANSWER_S
        if isinstance(answer, Started):
            rank = self._ranks[answer.number]
            rank.pid = answer.pid
            rank.started.set_result(answer.pid)
        else:
            self._ranks.pop(answer.number).ended.set_result(answer.status)

    async def _answers(self) -> AsyncIterator[Started | Ended]:
        loop = asyncio.get_running_loop()
        splitter = FrameSplitter()
        while data := await loop.sock_recv(self._sock, _RECEIVE_BYTES):
            for body in splitter.feed(data):
                yield decode_answer(body)

    def _give_up(self) -> None:
        # Its ranks die with it, those of other replicas too: nobody can start or end ranks now.
        logger.error("fork server is stuck", extra={"pid": self.pid})
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _lose_all(self) -> None:
        while not self._orders.empty():  # nobody sends them any more
            _, fds = self._orders.get_nowait()
            for fd in fds:
                os.close(fd)
        for rank in self._ranks.values():
            rank.ended.set_result(LOST)
        self._ranks.clear()
