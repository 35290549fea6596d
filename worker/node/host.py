"""One host of a group: starts its share of any replica, from one fork server.

The fork server is started when it is first needed, and anew when it has died.
"""

import asyncio
import socket

import msgspec

from worker.config import RankConfig
from worker.group.topology import Topology
from worker.node.forks import FIRST_ANSWER_S, ForkServer
from worker.node.share import Life, Share, start_share


class Host:
    """Close it when no ranks are left; `base` has what all ranks of this host share.

    A fork server that has started no rank after `startup_s` seconds is replaced.
    """

    def __init__(
        self,
        base: RankConfig,
        *,
        nnodes: int = 1,
        node_rank: int = 0,
        startup_s: float = FIRST_ANSWER_S,
    ) -> None:
        self._base = base
        self._nnodes = nnodes
        self._node_rank = node_rank
        self._startup_s = startup_s
        self._forks: ForkServer | None = None
        self._starting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Host {self._node_rank} of {self._nnodes}, {self._forks}>"

    async def start(self, life: Life, *, address: str, store: socket.socket | None = None) -> Share:
        """Start this host's ranks of a replica and wait until their processes are there.

        Args:
            life: Which start of which replica.
            address: Of this host, for its ranks to bind to.
            store: The listening socket of the place where the ranks meet; host 0 has one.

        Raises:
            OSError: A socket or a process could not be made; none is left.
        """
        forks = await self._fork_server()
        # A group that was scaled up has replicas beyond those that it began with.
        dp = max(self._base.dp, life.dp_rank + 1)
        base = msgspec.structs.replace(self._base, dp=dp, host=address)
        topology = Topology(dp, base.pp, base.tp, self._nnodes)
        return await start_share(
            forks, base, topology, life, node_rank=self._node_rank, store=store
        )

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
                self._forks = await ForkServer.start(self._base, self._startup_s)
            return self._forks
