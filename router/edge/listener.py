"""An ASGI application on a port, inside this event loop. Knows uvicorn; no application."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator
from typing import ClassVar

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

UNREAD_S = 60.0
REQUEST_S = 60.0


class _Impatient(H11Protocol):
    """Cuts a connection whose client does not finish its request in time.

    uvicorn itself bounds only the pause after an answer: one byte a day would hold a socket.
    """

    request_s: ClassVar[float] = REQUEST_S
    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def handle_events(self) -> None:
        super().handle_events()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._disarm()

    def _expect(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._disarm()
        elif self._due is None:
            self._due = self.loop.call_later(self.request_s, self.transport.abort)

    def _disarm(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process, which has other servers too, and sleeps until it ends.

    uvicorn's own loop wakes ten times a second for signals and the date header.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """Begin to shut down."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        """Wait for the end."""
        await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """Serves an application.

    Args:
        app: The application.
        host: Address to listen on.
        port: 0 takes a free one.
        unread_s: A connection whose client takes nothing of what waits for it is cut by then.
        request_s: So is one whose client does not finish its request.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        unread_s: float = UNREAD_S,
        request_s: float = REQUEST_S,
    ) -> None:
        self._address = (host, port)
        self._unread_ms = math.ceil(unread_s * 1000)
        self._config = uvicorn.Config(
            app,
            http=type("_Impatient", (_Impatient,), {"request_s": request_s}),
            log_config=None,
            log_level="warning",  # the service says itself that it listens, and where
            access_log=False,
            lifespan="off",
            server_header=False,
            date_header=False,
        )
        self._server = _Uvicorn(self._config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Listen; return the port.

        Raises:
            OSError: The address can't be had.
        """
        listening = socket.create_server(self._address, backlog=self._config.backlog)
        # Connections inherit it. asyncio sets it only on sockets that it makes itself; without it
        # the end of every answer waits 40 ms for the client's delayed acknowledgement.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Closing waits until all is sent; a client that never reads would hold it for ever.
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._unread_ms)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        return int(listening.getsockname()[1])

    async def stop(self, *, grace_s: float) -> None:
        """Take no new requests, let running ones end within `grace_s`, cancel the rest."""
        if self._task is None:
            return
        task, self._task = self._task, None
        self._config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.leave()
        await asyncio.wait([task])
