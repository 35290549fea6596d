"""The front's end of the unix socket to rank (0, 0): messages out, messages in, and its death.

Knows frames and bounds; knows nothing of what the messages mean. The end of the
stream means that the rank is gone, whatever the reason.
"""

import asyncio
import socket
from collections.abc import Callable

import msgspec

from radixmesh.errors import GroupLost, QueueFull
from worker.group.framing import FrameSplitter, FramingError, frame
from worker.request import Cancel, Inbound, Outbound, Probe

MAX_PENDING_BYTES = 64 << 20


class Mailbox(asyncio.Protocol):
    """One replica's socket. Both callbacks run on the event loop.

    `on_message` gets each message in order. `on_lost` is called once, with a reason
    for people, after the last message; neither is called after `close`.
    """

    def __init__(
        self,
        on_message: Callable[[Outbound], None],
        on_lost: Callable[[str], None],
        *,
        max_pending_bytes: int = MAX_PENDING_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._max_pending_bytes = max_pending_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Outbound] = msgspec.msgpack.Decoder(Outbound)
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._reason = "the rank closed its socket"
        self._closed = False

    async def connect(self, sock: socket.socket) -> None:
        """Take over a connected socket; it is closed with the mailbox."""
        sock.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=sock)

    def send(self, message: Inbound) -> None:
        """Send a message; never blocks.

        Raises:
            GroupLost: The rank is gone.
            QueueFull: The rank has not read for so long that the buffer is full. Cancels and
                probes still go: they are few, the ones free what is in the way, and the others
                tell when it is too long.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            raise GroupLost("the replica is gone")
        over = transport.get_write_buffer_size() > self._max_pending_bytes
        if over and not isinstance(message, Cancel | Probe):
            raise QueueFull("the replica does not read its mailbox")
        transport.write(frame(self._encoder.encode(message)))

    def close(self) -> None:
        """Close the socket, which tells the rank to stop."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (asyncio)."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a mailbox needs a stream socket")
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Deliver every message that is complete (asyncio)."""
        try:
            for body in self._splitter.feed(data):
                if self._closed:
                    return
                self._on_message(self._decoder.decode(body))
        except (FramingError, msgspec.MsgspecError) as error:
            self._reason = f"the rank sent what can't be read: {error}"
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the death (asyncio)."""
        self._transport = None
        if not self._closed:
            self._closed = True
            self._on_lost(f"{self._reason}: {exc}" if exc else self._reason)
