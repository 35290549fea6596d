"""One dial of a link: connect, exchange hellos, hang up. Knows no entry; `link.py` dials again."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc.aio

from radixmesh.errors import LinkLost
from radixmesh.rpc.channel import open_channel
from radixmesh.rpc.frames import Frame, Peer, introduced
from radixmesh.rpc.pump import lost

__all__ = ["Attach", "Dialled", "dial"]

Down = TypeVar("Down", bound=Frame)
Up = TypeVar("Up", bound=Frame)

Attach = Callable[[grpc.aio.Channel], grpc.aio.StreamStreamMultiCallable[Down, Up]]


@dataclass(frozen=True, slots=True)
class Dialled(Generic[Down, Up]):
    """A stream on which both sides have said hello."""

    peer: Peer
    first: Up
    call: grpc.aio.StreamStreamCall[Down, Up]


@asynccontextmanager
async def dial(
    address: str, attach: Attach[Down, Up], greeting: Down, *, timeout_s: float
) -> AsyncGenerator[Dialled[Down, Up], None]:
    """Connect and greet; hang up at the end, whatever happened.

    Each dial has a channel of its own: gRPC's own back-off would add to ours, and a
    connection that froze must not be met again.

    Raises:
        LinkLost: Nobody is there, or nobody says hello in time.
        NotSupported: The peer speaks another version, or says that we do.
        InvalidRequest: The peer's first frame has no hello, or it refuses ours.
    """
    channel = open_channel(address)
    try:
        call = attach(channel)()
        try:
            first = await _greet(call, greeting, timeout_s)
            yield Dialled(introduced(first), first, call)
        finally:
            call.cancel()
    finally:
        await channel.close()


async def _greet(call: grpc.aio.StreamStreamCall[Down, Up], greeting: Down, timeout_s: float) -> Up:
    try:
        async with asyncio.timeout(timeout_s):
            await call.write(greeting)
            first: Any = await call.read()
    except TimeoutError:
        raise LinkLost(f"no hello within {timeout_s} s") from None
    except (grpc.RpcError, asyncio.InvalidStateError) as error:
        raise lost(error) from None
    if first is grpc.aio.EOF:
        raise LinkLost("the peer closed the link before its hello")
    return first  # type: ignore[no-any-return]
