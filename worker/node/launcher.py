"""The ranks of one replica, on all hosts: start them, see one die, end them all.

Knows hosts and processes; knows neither messages nor when to start again.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager

from worker.config import RankConfig
from worker.group.launch import needs_meeting
from worker.node.agreement import shared_settings
from worker.node.forks import FIRST_ANSWER_S
from worker.node.host import Host
from worker.node.rendezvous import RemoteShare, Rendezvous, Work
from worker.node.share import Life, Share


class RankSet:
    """All ranks of one incarnation. `mailbox` is the front's end of the socket to rank (0, 0)."""

    def __init__(self, here: Share, elsewhere: Sequence[RemoteShare] = ()) -> None:
        assert here.mailbox is not None, "host 0 has every rank (0, 0)"
        self.mailbox: socket.socket = here.mailbox
        self._shares: list[Share | RemoteShare] = [here, *elsewhere]

    async def first_end(self) -> str:
        """Wait until a rank ends or a host is lost; return which and how, for people."""
        ends = [asyncio.ensure_future(share.first_end()) for share in self._shares]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return "; ".join(end.result() for end in ends if end in done)
        finally:
            for end in ends:
                end.cancel()

    async def died(self) -> bool:
        """Whether a rank has died; see `Share.died`."""
        deaths = [asyncio.ensure_future(share.died()) for share in self._shares]
        try:
            for death in asyncio.as_completed(deaths):
                if await death:
                    return True
            return False
        finally:
            for each in deaths:
                each.cancel()

    def dump(self) -> None:
        """Have every rank that still can write its stacks and its state to the log."""
        for share in self._shares:
            share.dump()

    async def end(self, grace_s: float) -> None:
        """Wait for the ranks to go by themselves, then kill what is left. All are reaped."""
        await asyncio.gather(*(share.end(grace_s) for share in self._shares))


class RankLauncher:
    """Starts the ranks of any replica of a group.

    `base` has what all ranks share; `rendezvous` the other hosts, None where there are
    none; `startup_s` as of `Host`. Close it when no ranks are left.
    """

    def __init__(
        self,
        base: RankConfig,
        *,
        nnodes: int = 1,
        rendezvous: Rendezvous | None = None,
        startup_s: float = FIRST_ANSWER_S,
    ) -> None:
        self._base = base
        self._host = Host(base, nnodes=nnodes, startup_s=startup_s)
        self._rendezvous = rendezvous

    async def __call__(self, dp_rank: int, incarnation: int) -> RankSet:
        """Start the ranks of a replica; waits, for ever, until all hosts are there.

        Raises:
            OSError: A socket or a process could not be made, or a host was lost; none is left.
        """
        life = Life(dp_rank=dp_rank, incarnation=incarnation)
        if self._rendezvous is not None:
            return await self._start_everywhere(self._rendezvous, life)
        address = self._base.host
        if not needs_meeting(self._base):
            return RankSet(await self._host.start(life, address=address))
        # Bound here and passed on, so that nobody else can take the port meanwhile.
        with socket.create_server((address, 0)) as store:
            here = await self._host.start(_met(life, store), address=address, store=store)
        return RankSet(here)

    @property
    def missing(self) -> list[int]:
        """Further hosts that are not there, so that nothing starts."""
        return [] if self._rendezvous is None else self._rendezvous.missing

    async def aclose(self) -> None:
        """End what starts the ranks, and what is left of them."""
        await self._host.aclose()

    async def _start_everywhere(self, rendezvous: Rendezvous, life: Life) -> RankSet:
        await rendezvous.complete()
        with rendezvous.open_store() as store:
            life = _met(life, store)
            elsewhere = await rendezvous.start(life)
            try:
                here = await self._host.start(life, address=rendezvous.address, store=store)
            except BaseException:
                await asyncio.gather(*(share.end(0) for share in elsewhere))
                raise
        return RankSet(here, elsewhere)


@asynccontextmanager
async def open_launcher(
    base: RankConfig,
    *,
    nnodes: int = 1,
    meeting: tuple[str, str] = ("", ""),
    work: Work | None = None,
    startup_s: float = FIRST_ANSWER_S,
) -> AsyncGenerator[RankLauncher, None]:
    """Keep a launcher; with further hosts it listens for them at `meeting` (host, port).

    It has `work` held while one of them leaves, and until all are there again.

    Raises:
        OSError: That port can't be had.
    """
    if nnodes == 1:
        async with aclosing(RankLauncher(base, startup_s=startup_s)) as launcher:
            yield launcher
        return
    async with aclosing(Rendezvous(nnodes, shared_settings(base, nnodes), work=work)) as rendezvous:
        try:
            await rendezvous.listen(meeting[0], int(meeting[1]))
        except OSError as error:
            raise OSError(f"--rendezvous {':'.join(meeting)}: {error}") from error
        launcher = RankLauncher(base, nnodes=nnodes, rendezvous=rendezvous, startup_s=startup_s)
        async with aclosing(launcher):
            yield launcher


def _met(life: Life, store: socket.socket) -> Life:
    host, port = store.getsockname()[:2]
    return Life(
        dp_rank=life.dp_rank, incarnation=life.incarnation, store_host=host, store_port=port
    )
