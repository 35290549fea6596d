"""Rank (0, 0)'s end of the socket to the front. Waits without using the CPU; never deadlocks.

Knows frames and messages; decides nothing. The socket does not block: while a
large output waits for room, arriving input is read, so the two ends can never
wait for each other.
"""

import select
import socket
from typing import Final

import msgspec

from worker.group.framing import FrameSplitter, frame
from worker.request import Inbound, Outbound

# Input taken in one turn; what lies behind it waits in the socket for the next step.
_DRAIN_BYTES: Final = 4 << 20
_RECEIVE_BYTES: Final = 1 << 18
_DECODER: Final = msgspec.msgpack.Decoder(Inbound)


class FrontGone(Exception):
    """The front closed its end or died; the rank ends too."""


class Mailbox:
    """Messages from the front, and outputs to it."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._splitter = FrameSplitter()
        self._arrived: list[Inbound] = []

    def __repr__(self) -> str:
        return f"<Mailbox {len(self._arrived)} arrived>"

    def take(self, *, wait: bool) -> list[Inbound]:
        """Return what has arrived, in order.

        Args:
            wait: Whether to block until there is something.

        Raises:
            FrontGone: The front is gone.
            FramingError: The stream makes no sense; so does msgspec.ValidationError.
        """
        self._read_all()
        while wait and not self._arrived:
            self._poll(select.POLLIN)
            self._read_all()
        arrived, self._arrived = self._arrived, []
        return arrived

    def send(self, message: Outbound) -> None:
        """Send one message, however large.

        Raises:
            FrontGone: The front is gone.
        """
        view = memoryview(frame(msgspec.msgpack.encode(message)))
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                if self._poll(select.POLLIN | select.POLLOUT) & select.POLLIN:
                    self._read_all()
            except OSError as error:
                raise FrontGone("the front is gone") from error

    def close(self) -> None:
        """Let go."""
        self._sock.close()

    def _read_all(self) -> None:
        budget = _DRAIN_BYTES
        while budget > 0:
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                raise FrontGone("the front is gone") from error
            if not data:
                raise FrontGone("the front closed the mailbox")
            budget -= len(data)
            self._arrived += [_DECODER.decode(body) for body in self._splitter.feed(data)]

    def _poll(self, events: int) -> int:
        poller = select.poll()
        poller.register(self._sock, events)
        return poller.poll()[0][1]
