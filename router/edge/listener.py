"""An ASGI application on a port, inside this event loop. Knows uvicorn; no application."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

UNREAD_S = 60.0


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
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, unread_s: float = UNREAD_S) -> None:
        self._address = (host, port)
        self._unread_ms = math.ceil(unread_s * 1000)
        self._config = uvicorn.Config(
            app,
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
