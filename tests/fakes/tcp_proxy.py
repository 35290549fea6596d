"""A TCP proxy that can freeze, cut, or cut in the middle of a transfer. Knows bytes only."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager


class TcpProxy:
    """Forwards one port to another.

    Attributes:
        port: Where it listens.
        accepted: Connections so far.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self.accepted = 0
        self._target_port = target_port
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._budget: int | None = None
        self.was_cut = asyncio.Event()

    def freeze(self) -> None:
        """Keep connections open and move nothing; new ones are accepted and ignored."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Move bytes again."""
        self._flowing.set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self.was_cut.set()

    def cut_after(self, count: int) -> None:
        """Reset every connection once `count` more bytes went back to the dialling side."""
        self._budget = count

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        try:
            await self._flowing.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            self._writers.add(far_writer)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._forward(reader, far_writer, back=False))
                tasks.create_task(self._forward(far_reader, writer, back=True))
        except OSError:
            writer.transport.abort()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, back: bool
    ) -> None:
        try:
            while data := await reader.read(16384):
                await self._flowing.wait()
                if back and self._budget is not None:
                    data, self._budget = data[: self._budget], max(0, self._budget - len(data))
                writer.write(data)
                await writer.drain()
                if back and self._budget == 0:
                    self._budget = None
                    self.cut()
                    return
        except ConnectionError:
            return
        finally:
            writer.transport.abort()


@asynccontextmanager
async def proxy_to(port: int) -> AsyncGenerator[TcpProxy, None]:
    """Run a proxy on a free port."""
    proxy = TcpProxy(port)
    async with await asyncio.start_server(proxy._accept, "127.0.0.1", 0) as server:
        proxy.port = server.sockets[0].getsockname()[1]
        try:
            yield proxy
        finally:
            proxy.thaw()
            proxy.cut()
