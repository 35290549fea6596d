"""A host's share of one replica: its ranks with the descriptors that they need, and their ends.

Knows topology, descriptors and processes; knows neither other hosts nor who asks.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from worker.config import RankConfig
from worker.group.topology import Place, Topology
from worker.group.watchdog import DUMP_SIGNAL, STUCK_EXIT_STATUS
from worker.node.forks import ForkServer, RankProcess
from worker.parallel.segment import Unavailable, abort, make_segment

logger = logging.getLogger(__name__)

# Ranks leave by themselves, with status 0, when another one died or is stuck. They may be
# heard of first; the death that they left for comes within so many seconds.
DEATH_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One start of one replica.

    Attributes:
        dp_rank: Which replica.
        incarnation: Which start of it.
        store_host: Where its ranks meet; store_port: likewise, 0 where they need not.
    """

    dp_rank: int
    incarnation: int
    store_host: str = "127.0.0.1"
    store_port: int = 0


@dataclass(frozen=True, slots=True)
class _Wiring:
    """What each rank of a share is given. Ours stays with the share."""

    mailbox: int = -1
    store: int = -1
    tensors: Mapping[int, int] = field(default_factory=dict)
    broadcast: Mapping[Place, tuple[int, ...]] = field(default_factory=dict)

    def configure(
        self, base: RankConfig, place: Place, life: Life, topology: Topology
    ) -> RankConfig:
        first = place.pp_rank == place.tp_rank == 0
        return msgspec.structs.replace(
            base,
            dp_rank=place.dp_rank,
            pp_rank=place.pp_rank,
            tp_rank=place.tp_rank,
            device=topology.device(place),
            store_host=life.store_host,
            store_port=life.store_port,
            mailbox_fd=self.mailbox if first else -1,
            store_fd=self.store if first else -1,
            tensor_fd=self.tensors.get(place.pp_rank, -1),
            broadcast_fds=self.broadcast.get(place, ()),
        )


class Share:
    """Running ranks of one replica on this host. `mailbox` is the front's end of rank (0, 0)'s."""

    def __init__(
        self, forks: ForkServer, mailbox: socket.socket | None, segments: Sequence[int]
    ) -> None:
        self.ranks: Sequence[RankProcess] = []
        self.mailbox = mailbox
        self._forks = forks
        self._segments = list(segments)

    def __repr__(self) -> str:
        return f"<Share of {len(self.ranks)} ranks>"

    async def first_end(self) -> str:
        """Wait until a rank ends; return which and how, for people.

        Those that died are named, not those that left because of it.
        """
        await asyncio.wait([rank.ended for rank in self.ranks], return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_S):
                await self._first_death()
        ended = [rank for rank in self.ranks if rank.ended.done()]
        died = [rank for rank in ended if rank.ended.result()]
        return "; ".join(rank.describe_end() for rank in died or ended)

    async def died(self) -> bool:
        """Whether a rank has died, which explains a loss: neither left, nor found itself stuck.

        Waits a moment for one that is dying.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_S):
                await self._first_death()
        ended = [rank.ended.result() for rank in self.ranks if rank.ended.done()]
        return any(status not in (0, STUCK_EXIT_STATUS) for status in ended)

    async def _first_death(self) -> None:
        """Wait until a rank ends with another status than 0, or all have ended."""
        for ended in asyncio.as_completed([rank.ended for rank in self.ranks]):
            if await ended:
                return

    def dump(self) -> None:
        """Have every rank that still can write its stacks and its state to the log."""
        self._forks.signal(self.ranks, DUMP_SIGNAL)

    async def end(self, grace_s: float) -> None:
        """Wait for the ranks to go by themselves, then kill what is left. All are reaped."""
        try:
            if grace_s > 0:
                self._release()
                await asyncio.wait([rank.ended for rank in self.ranks], timeout=grace_s)
        finally:
            await self._forks.kill(self.ranks)
            self._release()

    def _release(self) -> None:
        """Let no rank wait for another in the memory that they share."""
        while self._segments:
            fd = self._segments.pop()
            abort(fd)
            os.close(fd)


async def start_share(
    forks: ForkServer,
    base: RankConfig,
    topology: Topology,
    life: Life,
    *,
    node_rank: int = 0,
    store: socket.socket | None = None,
) -> Share:
    """Start a host's ranks of a replica and wait until their processes are there.

    Args:
        forks: Starts them.
        base: What all ranks of this host share.
        topology: Of the group.
        life: Which start of which replica.
        node_rank: Which host this is.
        store: The listening socket of the place where the ranks meet; host 0 has one.

    Raises:
        OSError: A socket or a process could not be made; none is left.
    """
    places = topology.share(life.dp_rank, node_rank)
    with contextlib.ExitStack() as theirs:
        ours, wiring = _wire(base, places, theirs)
        if store is not None:
            wiring = replace(wiring, store=store.fileno())
        share = Share(forks, ours, list(wiring.tensors.values()))
        try:
            configs = [wiring.configure(base, place, life, topology) for place in places]
            share.ranks = [forks.fork(config) for config in configs]
            await _begun(forks, share.ranks)
        except BaseException:
            if ours is not None:
                ours.close()
            await share.end(0)
            raise
        return share


async def _begun(forks: ForkServer, ranks: Sequence[RankProcess]) -> None:
    for rank in ranks:
        await forks.begun(rank)
        if not rank.started.done():
            raise ConnectionError(rank.describe_end())


def _wire(
    base: RankConfig, places: Sequence[Place], theirs: contextlib.ExitStack
) -> tuple[socket.socket | None, _Wiring]:
    """Make sockets and segments for a share; `theirs` closes the sockets that only ranks need."""
    wiring = _Wiring(tensors=dict(_segments(base, places)))
    if (places[0].pp_rank, places[0].tp_rank) != (0, 0):
        return None, wiring
    if base.carrier == "local":
        wiring = replace(wiring, broadcast=_broadcast(places, theirs))
    ours, mailbox = socket.socketpair()
    theirs.enter_context(mailbox)
    return ours, replace(wiring, mailbox=mailbox.fileno())


def _broadcast(
    places: Sequence[Place], theirs: contextlib.ExitStack
) -> dict[Place, tuple[int, ...]]:
    pairs = [socket.socketpair() for _ in places[1:]]
    for sock in (sock for pair in pairs for sock in pair):
        theirs.enter_context(sock)
    roots = tuple(root.fileno() for root, _ in pairs)
    leaves = ((leaf.fileno(),) for _, leaf in pairs)
    return dict(zip(places, (roots, *leaves), strict=True))


def _segments(base: RankConfig, places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Yield (stage, descriptor); the share closes them. Without any, ranks use gloo."""
    if base.tensors != "shm" or base.tp == 1 or base.engine != "torch":
        return
    for stage in sorted({place.pp_rank for place in places}):
        try:
            yield stage, make_segment(base.tp)
        except Unavailable as error:
            logger.warning("no shared memory", extra={"error": error.message})
            return
