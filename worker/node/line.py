"""The line between host 0 and each further host: messages, frames, and the proof of life.

Both ends say something every `BEAT_S`; an end that hears nothing for `LOST_S` has lost
the other, whatever TCP still believes.
"""

import asyncio
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from radixmesh.errors import LinkLost
from worker.group.framing import HEADER, MAX_BODY_BYTES, frame

BEAT_S: Final = 2.0
LOST_S: Final = 6.0


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First word of a further host: which one it is, and what it was told of the group."""

    node_rank: int
    settings: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Host 0 takes it."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Host 0 does not; `forever` when another try would be refused as well."""

    why: str
    forever: bool


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """Nothing to say."""


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """A further host is told to stop; it stays until host 0 lets it go, or its grace is over."""


class MayLeave(msgspec.Struct, frozen=True, tag="may leave"):
    """Nothing runs any more for which the host is needed."""


class StartShare(msgspec.Struct, frozen=True, tag="start"):
    """Start the host's ranks of a replica; they meet at this port of host 0."""

    dp_rank: int
    incarnation: int
    store_port: int


class ShareStarted(msgspec.Struct, frozen=True, tag="started"):
    """The processes are there; or they are not, and `error` says why."""

    incarnation: int
    error: str = ""


class ShareEnded(msgspec.Struct, frozen=True, tag="ended"):
    """A rank has ended: which and how, for people; and whether it died, as of `Share.died`."""

    incarnation: int
    how: str
    died: bool = False


class DumpShare(msgspec.Struct, frozen=True, tag="dump"):
    """Have the ranks write their stacks."""

    incarnation: int


class EndShare(msgspec.Struct, frozen=True, tag="end"):
    """End the ranks; those that go by themselves within the grace are not killed."""

    incarnation: int
    grace_s: float


class ShareGone(msgspec.Struct, frozen=True, tag="gone"):
    """All ranks of the share are reaped."""

    incarnation: int


Message: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | Beat
    | Leaving
    | MayLeave
    | StartShare
    | ShareStarted
    | ShareEnded
    | DumpShare
    | EndShare
    | ShareGone
)


class Line:
    """One end of a connection."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        beat_s: float = BEAT_S,
        lost_s: float = LOST_S,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._beat_s = beat_s
        self._lost_s = lost_s
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)

    def __repr__(self) -> str:
        return f"<Line {self.here} to {self.there}>"

    @property
    def here(self) -> str:
        """This host's address on the line."""
        address: str = self._writer.get_extra_info("sockname")[0]
        return address

    @property
    def there(self) -> str:
        """The other host's address on the line."""
        address: str = self._writer.get_extra_info("peername")[0]
        return address

    def send(self, message: Message) -> None:
        """Send; never blocks. What can't arrive is noticed by `receive`."""
        self._writer.write(frame(msgspec.msgpack.encode(message)))

    async def receive(self) -> Message:
        """Wait for the next message that says something.

        Raises:
            LinkLost: The other end is gone, silent for too long, or makes no sense.
        """
        while True:
            message = await self._next()
            if not isinstance(message, Beat):
                return message

    async def beat(self) -> NoReturn:
        """Say again and again that this end is there."""
        while True:
            self.send(Beat())
            await asyncio.sleep(self._beat_s)

    def close(self) -> None:
        """Hang up, also where the other end takes nothing any more."""
        self._writer.transport.abort()

    async def flush(self) -> None:
        """Wait until what was sent is on its way, for a last word."""
        self._writer.close()
        try:
            async with asyncio.timeout(self._beat_s):
                await self._writer.wait_closed()
        except (OSError, TimeoutError):
            self.close()

    async def _next(self) -> Message:
        try:
            async with asyncio.timeout(self._lost_s):
                (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if size > MAX_BODY_BYTES:
                    raise LinkLost(f"{self.there} announces {size} bytes")
                message: Message = self._decoder.decode(await self._reader.readexactly(size))
        except TimeoutError as error:
            raise LinkLost(f"nothing was heard for {self._lost_s:.0f} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LinkLost("the connection is gone") from error
        except msgspec.MsgspecError as error:
            raise LinkLost(f"what came makes no sense: {error}") from error
        return message
