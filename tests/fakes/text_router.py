"""The router's end of a link to a tokenizer or detokenizer: sends frames, keeps what comes back."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import grpc.aio

from radixmesh.blocks import pack_ids
from radixmesh.detokenizer.v1 import detokenizer_service_pb2 as detokenizer_pb
from radixmesh.detokenizer.v1.detokenizer_service_pb2_grpc import DetokenizerServiceStub
from radixmesh.errors import MeshError
from radixmesh.rpc.link import Identity, Lane, Link, Peer
from radixmesh.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from radixmesh.tokenizer.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub

Down = TypeVar("Down", tokenizer_pb.AttachRequest, detokenizer_pb.AttachRequest)
Up = TypeVar("Up", tokenizer_pb.AttachResponse, detokenizer_pb.AttachResponse)

ROUTER = Identity("router", "test")
PATIENCE_S = 10.0


class Failed:
    """The sink of one entry: keeps its failure."""

    def __init__(self, ended: asyncio.Event) -> None:
        self._ended = ended
        self.error: MeshError | None = None

    def on_failed(self, error: MeshError) -> None:
        self.error = error
        self._ended.set()


class TextRouter(Generic[Down, Up]):
    """A connected link and all frames that came on it."""

    def __init__(
        self, make_link: Callable[["TextRouter[Down, Up]"], Link[Down, Up, Failed]]
    ) -> None:
        self.frames: list[Up] = []
        self.sinks: dict[int, Failed] = {}
        self.news = asyncio.Event()
        self.link: Link[Down, Up, Failed] = make_link(self)

    def on_up(self, peer: Peer, *, is_new: bool) -> None:
        self.news.set()

    def on_frame(self, frame: Up) -> None:
        self.frames.append(frame)
        self.news.set()

    def on_down(self, error: MeshError) -> None:
        self.news.set()

    def open(self) -> int:
        """Begin an entry."""
        sink = Failed(self.news)
        entry_id = self.link.open(sink)
        self.sinks[entry_id] = sink
        return entry_id

    def send(self, frame: Down) -> None:
        self.link.send(frame, Lane.CONTROL)

    def error(self, entry_id: int) -> MeshError | None:
        """Why an entry failed, if it did."""
        return self.sinks[entry_id].error

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until frames or failures made the condition true."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.news.clear()
                await self.news.wait()


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncGenerator[None]:
    """Run something beside the body and cancel it afterwards; its errors come out."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(work)
        try:
            yield
        finally:
            task.cancel()


@asynccontextmanager
async def tokenizer_router(
    port: int,
) -> AsyncGenerator[TextRouter[tokenizer_pb.AttachRequest, tokenizer_pb.AttachResponse]]:
    """A router attached to a tokenizer."""
    router = TextRouter[tokenizer_pb.AttachRequest, tokenizer_pb.AttachResponse](
        lambda listener: Link(
            f"127.0.0.1:{port}",
            attach=lambda channel: TokenizerServiceStub(channel).Attach,
            down=tokenizer_pb.AttachRequest,
            listener=listener,
            identity=ROUTER,
        )
    )
    async with running(router.link.run()):
        await router.until(lambda: bool(router.frames))
        yield router


DetokenizerRouter = TextRouter[detokenizer_pb.AttachRequest, detokenizer_pb.AttachResponse]


@asynccontextmanager
async def detokenizer_router(port: int) -> AsyncGenerator[DetokenizerRouter]:
    """A router attached to a detokenizer."""
    router = DetokenizerRouter(
        lambda listener: Link(
            f"127.0.0.1:{port}",
            attach=lambda channel: DetokenizerServiceStub(channel).Attach,
            down=detokenizer_pb.AttachRequest,
            listener=listener,
            identity=ROUTER,
        )
    )
    async with running(router.link.run()):
        await router.until(lambda: bool(router.frames))
        yield router


def add_tokens(
    frame: detokenizer_pb.AttachRequest, *columns: tuple[int, int, Sequence[int]]
) -> detokenizer_pb.AttachRequest:
    """Add one Tokens item: (entry, position, ids) of each output."""
    frame.tokens.add(
        entry_ids=[entry_id for entry_id, _, _ in columns],
        positions=[position for _, position, _ in columns],
        counts=[len(ids) for _, _, ids in columns],
        token_ids=b"".join(pack_ids(ids) for _, _, ids in columns),
    )
    return frame


@asynccontextmanager
async def channel_to(port: int) -> AsyncGenerator[grpc.aio.Channel]:
    """A channel for plain calls."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


@asynccontextmanager
async def app(
    serve: Callable[[asyncio.Event, Callable[[int], None]], Coroutine[Any, Any, None]],
) -> AsyncGenerator[int]:
    """Run a service's app in this process; yields its port, stops it as a signal would."""
    stop = asyncio.Event()
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(stop, port.set_result))
        try:
            yield await port
        finally:
            stop.set()
