"""The rank processes of one replica: start them with their sockets, see one die, end them all.

Knows processes and descriptors; knows neither messages nor when to start again.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from radixmesh.settings import child_environment
from worker.group.launch import RankConfig, rank_command
from worker.group.topology import Place, Topology


@dataclass(frozen=True, slots=True)
class _Rank:
    place: Place
    process: asyncio.subprocess.Process

    def describe_end(self) -> str:
        code = self.process.returncode
        if code is None:
            return f"rank {self.place} runs"
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
            return f"rank {self.place} was killed by {name}"
        return f"rank {self.place} exited with status {code}"


class RankSet:
    """All ranks of one incarnation. `mailbox` is the front's end of the socket to rank (0, 0)."""

    def __init__(self, mailbox: socket.socket, ranks: Sequence[_Rank]) -> None:
        self.mailbox = mailbox
        self._ranks = ranks

    @property
    def pids(self) -> list[int]:
        """Process ids, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    async def first_end(self) -> str:
        """Wait until a rank ends; return which and how, for people."""
        waits = [asyncio.ensure_future(rank.process.wait()) for rank in self._ranks]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        ended = [rank for rank in self._ranks if rank.process.returncode is not None]
        return "; ".join(rank.describe_end() for rank in ended)

    async def end(self, grace_s: float) -> None:
        """Wait for the ranks to go by themselves, then kill what is left. All are reaped."""
        try:
            if grace_s > 0:
                async with asyncio.timeout(grace_s):
                    await self._reap()
        except TimeoutError:
            pass
        finally:
            for rank in self._ranks:
                if rank.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        rank.process.kill()
            await self._reap()

    async def _reap(self) -> None:
        await asyncio.gather(*(rank.process.wait() for rank in self._ranks))


class RankLauncher:
    """Starts the ranks of any replica of a group. `base` has what all ranks share."""

    def __init__(self, base: RankConfig) -> None:
        self._base = base
        self._topology = Topology(base.dp, base.pp, base.tp)

    async def __call__(self, dp_rank: int, incarnation: int) -> RankSet:
        """Start the ranks of a replica.

        Raises:
            OSError: A socket or a process could not be made; none is left.
        """
        places = list(self._topology.replica(dp_rank))
        with contextlib.ExitStack() as theirs:
            ours, mailbox = socket.socketpair()
            theirs.enter_context(mailbox)
            roots: list[socket.socket] = []
            leaves: list[socket.socket] = []
            for _ in places[1:]:
                root, leaf = socket.socketpair()
                roots.append(theirs.enter_context(root))
                leaves.append(theirs.enter_context(leaf))
            fds = [(mailbox.fileno(), [each.fileno() for each in roots])]
            fds += [(-1, [leaf.fileno()]) for leaf in leaves]
            configs = list(self._configs(places, fds, incarnation))
            ranks: list[_Rank] = []
            try:
                for place, config in zip(places, configs, strict=True):
                    ranks.append(_Rank(place, await _spawn(config)))
            except BaseException:
                ours.close()
                await RankSet(ours, ranks).end(0)
                raise
            return RankSet(ours, ranks)

    def _configs(
        self, places: Sequence[Place], fds: Sequence[tuple[int, list[int]]], incarnation: int
    ) -> Iterator[RankConfig]:
        for place, (mailbox_fd, broadcast_fds) in zip(places, fds, strict=True):
            yield msgspec.structs.replace(
                self._base,
                dp_rank=place.dp_rank,
                pp_rank=place.pp_rank,
                tp_rank=place.tp_rank,
                incarnation=incarnation,
                mailbox_fd=mailbox_fd,
                broadcast_fds=tuple(broadcast_fds),
            )


async def _spawn(config: RankConfig) -> asyncio.subprocess.Process:
    passed = [fd for fd in (config.mailbox_fd, *config.broadcast_fds) if fd >= 0]
    # A session of its own: Ctrl-C in a terminal reaches the front alone, which drains first.
    return await asyncio.create_subprocess_exec(
        *rank_command(config),
        stdin=asyncio.subprocess.DEVNULL,
        env=child_environment(),
        pass_fds=passed,
        start_new_session=True,
    )
