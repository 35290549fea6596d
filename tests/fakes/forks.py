"""A fork server and ranks, started as a front does, from a blocking test's side."""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import IO, Any, TypeVar, cast

import msgspec

from tests.fakes.rank_threads import FrontEnd
from worker.config import FakeConfig, RankConfig
from worker.group.launch import needs_meeting
from worker.group.topology import Topology
from worker.node.forks import ForkServer, RankProcess
from worker.node.share import Life, Share, start_share

T = TypeVar("T")


class Forks:
    """The fork server, on an event loop of its own; `close` ends it as the end of a front does.

    All that it and its ranks log goes to `log`, where one is given.
    """

    def __init__(self, base: RankConfig, log: IO[bytes] | None = None) -> None:
        self._loop = asyncio.new_event_loop()
        # The kernel ends the server with the thread that started it.
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        with _stderr_to(log):
            self.server = self.run(ForkServer.start(base))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        self.run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class Forked:
    """A rank process."""

    def __init__(self, forks: Forks, rank: RankProcess) -> None:
        self._forks = forks
        self._rank = rank
        self.pid = rank.pid

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return self._forks.run(self._ended())

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        self._forks.run(self._kill())

    async def _ended(self) -> int:
        async with asyncio.timeout(10):
            return await asyncio.shield(self._rank.ended)

    async def _kill(self) -> None:
        self._forks.server.signal([self._rank], signal.SIGKILL)


class ForkedRanks:
    """Processes of one replica, and the front's end of it. The last may have faults of its own."""

    def __init__(self, forks: Forks, base: RankConfig, last_faults: tuple[str, ...] = ()) -> None:
        server = cast(ForkServer, _Spoiling(forks.server, last_faults))
        share = forks.run(_start(server if last_faults else forks.server, base))
        assert share.mailbox is not None
        self.front = FrontEnd(share.mailbox)
        self.processes = [Forked(forks, rank) for rank in share.ranks]

    def close(self) -> list[int]:
        """End them as the end of a front does; return their statuses."""
        self.front.close()
        return [process.wait() for process in self.processes]


async def _start(server: ForkServer, base: RankConfig) -> Share:
    topology = Topology(pp=base.pp, tp=base.tp)
    if not needs_meeting(base):
        return await start_share(server, base, topology, Life(dp_rank=0, incarnation=1))
    with socket.create_server(("127.0.0.1", 0)) as store:
        life = Life(dp_rank=0, incarnation=1, store_port=store.getsockname()[1])
        return await start_share(server, base, topology, life, store=store)


class _Spoiling:
    """A fork server that gives the last rank of a replica other faults than its peers."""

    def __init__(self, server: ForkServer, faults: tuple[str, ...]) -> None:
        self._server = server
        self._fake = FakeConfig(faults=faults)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def fork(self, config: RankConfig) -> RankProcess:
        if (config.pp_rank + 1, config.tp_rank + 1) == (config.pp, config.tp):
            config = msgspec.structs.replace(config, fake=self._fake)
        return self._server.fork(config)


@contextmanager
def _stderr_to(log: IO[bytes] | None) -> Iterator[None]:
    """Let processes that are started meanwhile write their errors to a file."""
    if log is None:
        yield
        return
    own = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)
