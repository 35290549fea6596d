"""Host 0's side: where further hosts come, and what each of them runs for the group.

A host that is lost takes its share of every replica with it. Knows hosts and shares of
ranks; knows neither what a replica is for nor when to start it again.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from radixmesh.errors import LinkLost
from worker.node.agreement import difference
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
from worker.node.share import DEATH_S, Life

logger = logging.getLogger(__name__)


class RemoteShare:
    """A further host's ranks of one replica, as `Share` is this host's."""

    def __init__(self, line: Line, node_rank: int, incarnation: int) -> None:
        loop = asyncio.get_running_loop()
        self._line = line
        self._node_rank = node_rank
        self._incarnation = incarnation
        self._died = False
        self.started: asyncio.Future[str] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.gone: asyncio.Future[None] = loop.create_future()

    def __repr__(self) -> str:
        return f"<RemoteShare of {self._incarnation} on node {self._node_rank}>"

    def on_message(self, message: ShareStarted | ShareEnded | ShareGone) -> None:
        """Take what the host says of it."""
        if isinstance(message, ShareStarted):
            _settle(self.started, message.error)
        elif isinstance(message, ShareEnded):
            self._died = message.died
            _settle(self.ended, message.how)
        else:
            _settle(self.gone, None)

    def lose(self, why: str) -> None:
        """The host is lost; it kills its ranks by itself."""
        self._died = True
        _settle(self.started, why)
        _settle(self.ended, why)
        _settle(self.gone, None)

    async def first_end(self) -> str:
        """Wait until a rank ends, or the host is lost; return which and how, for people."""
        return await asyncio.shield(self.ended)

    async def died(self) -> bool:
        """As `Share.died`; a lost host's ranks have."""
        await asyncio.wait([self.ended], timeout=2 * DEATH_S)
        return self._died

    def dump(self) -> None:
        """Have every rank that still can write its stacks and its state to its host's log."""
        self._line.send(DumpShare(self._incarnation))

    async def end(self, grace_s: float) -> None:
        """Have the host end all, and wait until it has, or is lost."""
        if not self.gone.done():
            self._line.send(EndShare(self._incarnation, grace_s))
        await asyncio.shield(self.gone)


class _Node:
    """A further host that is there."""

    def __init__(self, line: Line, node_rank: int) -> None:
        self.line = line
        self.node_rank = node_rank
        self.shares: dict[int, RemoteShare] = {}
        self.leaving = False

    def lose(self, why: str) -> None:
        """End everything that it ran."""
        for share in self.shares.values():
            share.lose(f"node {self.node_rank} is lost: {why}")
        self.shares.clear()

    async def start(self, life: Life) -> RemoteShare:
        """Start its ranks of a replica. Raises ConnectionError when they are not there."""
        share = RemoteShare(self.line, self.node_rank, life.incarnation)
        self.shares[life.incarnation] = share
        self.line.send(StartShare(life.dp_rank, life.incarnation, life.store_port))
        try:
            why = await asyncio.shield(share.started)
        except asyncio.CancelledError:
            self.line.send(EndShare(life.incarnation, 0))
            raise
        if why:
            self.shares.pop(life.incarnation, None)
            raise ConnectionError(why)
        return share

    def on_message(self, message: Message) -> None:
        """Take what it says of a share; of one that is over, nothing."""
        if not isinstance(message, ShareStarted | ShareEnded | ShareGone):
            raise LinkLost(f"node {self.node_rank} said what only host 0 says")
        share = self.shares.get(message.incarnation)
        if share is not None:
            share.on_message(message)
        if isinstance(message, ShareGone):
            self.shares.pop(message.incarnation, None)


class Work(Protocol):
    """What the hosts do together, as far as one that leaves must know."""

    def hold(self) -> None:
        """Begin nothing new."""
        ...

    def go_on(self) -> None:
        """Take `hold` back."""
        ...

    async def idle(self) -> None:
        """Wait until nothing is under way."""
        ...


class NoWork:
    """Of hosts for which nobody has any."""

    def hold(self) -> None:
        """Do nothing."""

    def go_on(self) -> None:
        """Do nothing."""

    async def idle(self) -> None:
        """Return."""


class Rendezvous:
    """Listens for the hosts 1..nnodes-1. `settings` is what they must have been told too.

    A host that leaves has `work` held until all are there again.
    """

    def __init__(
        self,
        nnodes: int,
        settings: dict[str, str],
        *,
        work: Work | None = None,
        beat_s: float = BEAT_S,
        lost_s: float = LOST_S,
    ) -> None:
        self._nnodes = nnodes
        self._settings = settings
        self._work = work or NoWork()
        self._beat_s = beat_s
        self._lost_s = lost_s
        self._nodes: dict[int, _Node] = {}
        self._changed = asyncio.Event()
        self._serving: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def __repr__(self) -> str:
        return f"<Rendezvous of nodes 0, {sorted(self._nodes)}>"

    @property
    def address(self) -> str:
        """Where the others reach this host; known once it listens."""
        assert self._server is not None
        address: str = self._server.sockets[0].getsockname()[0]
        return address

    async def listen(self, host: str, port: int) -> int:
        """Begin to listen; return the port.

        Raises:
            OSError: The port can't be had.
        """
        self._server = await asyncio.start_server(self._accept, host, port)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def open_store(self) -> socket.socket:
        """Return a listening socket on the address of `listen`, where ranks will meet."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        return socket.create_server((self.address, 0), family=family)

    @property
    def missing(self) -> list[int]:
        """Hosts that are not there, or are about to leave."""
        there = {rank for rank, node in self._nodes.items() if not node.leaving}
        return [rank for rank in range(1, self._nnodes) if rank not in there]

    async def complete(self) -> None:
        """Wait until all hosts are there, for ever."""
        while missing := self.missing:
            logger.info("waiting for nodes", extra={"missing": missing})
            self._changed.clear()
            await self._changed.wait()

    async def start(self, life: Life) -> list[RemoteShare]:
        """Start the ranks of a replica that other hosts run.

        Raises:
            ConnectionError: A host is missing, or could not start its ranks; none is left.
        """
        started: list[RemoteShare] = []
        try:
            for rank in range(1, self._nnodes):
                share = await self._node(rank).start(life)
                started.append(share)
        except BaseException:
            await asyncio.gather(*(share.end(0) for share in started))
            raise
        return started

    async def aclose(self) -> None:
        """Hang up on all hosts."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)

    def _node(self, rank: int) -> _Node:
        if rank not in self._nodes:
            raise ConnectionError(f"node {rank} is lost")
        return self._nodes[rank]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer, beat_s=self._beat_s, lost_s=self._lost_s)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._serve(line)
        except LinkLost as error:
            logger.debug("connection lost", extra={"error": error.message})
        except asyncio.CancelledError:
            pass  # this is closing; asyncio's server would make a traceback of it
        finally:
            self._serving.discard(task)
            line.close()

    async def _serve(self, line: Line) -> None:
        hello = await line.receive()
        if not isinstance(hello, Hello):
            return
        if refused := self._refusal(hello):
            extra = {"node_rank": hello.node_rank, "address": line.there, "why": refused.why}
            logger.warning("node refused", extra=extra)
            line.send(refused)
            await line.flush()
            return
        node = _Node(line, hello.node_rank)
        self._nodes[hello.node_rank] = node
        why = "host 0 is closing"
        try:
            line.send(Welcome())
            logger.info("node is there", extra={"node_rank": node.node_rank, "address": line.there})
            self._changed.set()
            if not self.missing:
                self._work.go_on()
            await _attend(node, partial(self._let_go, node))
        except LinkLost as error:
            if node.leaving:
                why = "it was told to stop"
                logger.info("node left", extra={"node_rank": node.node_rank})
            else:
                why = error.message
                logger.error("node lost", extra={"node_rank": node.node_rank, "error": why})  # noqa: TRY400
        finally:
            del self._nodes[hello.node_rank]
            node.lose(why)

    async def _let_go(self, node: _Node) -> None:
        logger.info("node is leaving", extra={"node_rank": node.node_rank})
        node.leaving = True
        self._work.hold()
        await self._work.idle()
        node.line.send(MayLeave())

    def _refusal(self, hello: Hello) -> Refused | None:
        if not 0 < hello.node_rank < self._nnodes:
            why = f"there are nodes 0 to {self._nnodes - 1}, and no {hello.node_rank}"
            return Refused(why, forever=True)
        if why := difference(self._settings, hello.settings):
            return Refused(why, forever=True)
        if hello.node_rank in self._nodes:
            return Refused(f"node {hello.node_rank} is already there", forever=False)
        return None


async def _attend(node: _Node, let_go: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Take what a host says until it is lost. Raises LinkLost."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[Any]] = [loop.create_task(node.line.beat())]
    try:
        while True:
            message = await node.line.receive()
            if not isinstance(message, Leaving):
                node.on_message(message)
            elif not node.leaving:
                tasks.append(loop.create_task(let_go()))
    finally:
        for task in tasks:
            task.cancel()


def _settle(future: asyncio.Future[str] | asyncio.Future[None], value: str | None) -> None:
    if not future.done():
        future.set_result(value)  # type: ignore[arg-type]
