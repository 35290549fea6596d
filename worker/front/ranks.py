"""The ranks of one replica, wherever they run: start them, see one die, end them all.

Knows hosts and processes; knows neither messages nor when to start again.
"""

import asyncio
import socket

import msgspec

from worker.group.launch import RankConfig, needs_meeting
from worker.group.topology import Topology
from worker.node.forks import ForkServer
from worker.node.share import Life, Share, start_share


class RankSet:
    """All ranks of one incarnation. `mailbox` is the front's end of the socket to rank (0, 0)."""

    def __init__(self, mailbox: socket.socket, share: Share) -> None:
        self.mailbox = mailbox
        self._share = share

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this host, in rank order."""
        return [rank.pid for rank in self._share.ranks]

    async def first_end(self) -> str:
        """Wait until a rank ends; return which and how, for people."""
        return await self._share.first_end()

    def dump(self) -> None:
        """Have every rank that still can write its stacks and its state to the log."""
        self._share.dump()

    async def end(self, grace_s: float) -> None:
        """Wait for the ranks to go by themselves, then kill what is left. All are reaped."""
        await self._share.end(grace_s)


class RankLauncher:
    """Starts the ranks of any replica of a group, from one fork server.

    `base` has what all ranks share. Close it when no ranks are left.
    """

    def __init__(self, base: RankConfig) -> None:
        self._base = base
        self._forks: ForkServer | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, dp_rank: int, incarnation: int) -> RankSet:
        """Start the ranks of a replica.

        Raises:
            OSError: A socket or a process could not be made; none is left.
        """
        forks = await self._fork_server()
        # A group that was scaled up has replicas beyond those that it began with.
        base = msgspec.structs.replace(self._base, dp=max(self._base.dp, dp_rank + 1))
        places = Topology(base.dp, base.pp, base.tp).share(dp_rank, 0)
        if not needs_meeting(base):
            life = Life(dp_rank=dp_rank, incarnation=incarnation)
            share = await start_share(forks, base, places, life)
        else:
            # Bound here and passed on, so that nobody else can take the port meanwhile.
            with socket.create_server((base.store_host, 0)) as store:
                life = Life(
                    dp_rank=dp_rank,
                    incarnation=incarnation,
                    store_host=base.store_host,
                    store_port=store.getsockname()[1],
                )
                share = await start_share(forks, base, places, life, store=store)
        assert share.mailbox is not None
        return RankSet(share.mailbox, share)

    async def aclose(self) -> None:
        """End the fork server, and what is left of its ranks."""
        async with self._starting:
            if self._forks is not None:
                await self._forks.close()
                self._forks = None

    async def _fork_server(self) -> ForkServer:
        async with self._starting:
            if self._forks is not None and not self._forks.alive:
                await self._forks.close()
                self._forks = None
            if self._forks is None:
                self._forks = await ForkServer.start(self._base)
            return self._forks
