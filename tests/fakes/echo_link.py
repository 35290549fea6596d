"""An echo service on a link, and listeners that remember. Speaks the tokenizer's frames.

The text of an entry is its script:
  `hold`          no answer; the entry stays open
  `fail REASON`   the typed failure of that reason
  `boom`          the handler raises
  `size N`        an answer of N bytes
  anything else   the answer is the text
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from radixmesh.errors import BY_REASON, MeshError
from radixmesh.rpc.link import (
    Identity,
    Lane,
    Link,
    LinkLimits,
    Peer,
    Session,
    serve_link,
)
from radixmesh.rpc.server import Server
from radixmesh.tokenizer.v1.tokenizer_service_pb2 import (
    AttachRequest,
    AttachResponse,
    TokenizeEntry,
    TokenizeResult,
    TokenizerInfo,
)
from radixmesh.tokenizer.v1.tokenizer_service_pb2_grpc import (
    TokenizerServiceServicer,
    TokenizerServiceStub,
    add_TokenizerServiceServicer_to_server,
)

SERVICE = "radixmesh.tokenizer.v1.TokenizerService"
FAST = LinkLimits(
    heartbeat_s=0.1,
    peer_timeout_s=0.6,
    connect_timeout_s=0.5,
    backoff_initial_s=0.02,
    backoff_max_s=0.2,
)

EchoLink = Link[AttachRequest, AttachResponse, "Answer"]


@dataclass
class EchoHandler:
    """The service's side of one session."""

    session: Session[AttachResponse]
    cancelled: dict[int, MeshError] = field(default_factory=dict)
    opened: list[int] = field(default_factory=list)
    duplicates: list[int] = field(default_factory=list)
    cancels_heard: list[int] = field(default_factory=list)
    closed_by: MeshError | None = None
    feed_drops: int = 0
    frames: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        info = TokenizerInfo(model="echo")
        self.session.send(AttachResponse(info=info), Lane.CONTROL)

    def on_frame(self, frame: AttachRequest) -> None:
        self.frames += 1
        self.cancels_heard += frame.link.cancels
        for entry in frame.tokenize:
            self._begin(entry)

    def _begin(self, entry: TokenizeEntry) -> None:
        number = entry.entry_id
        self.opened.append(number)

        def on_cancel(error: MeshError) -> None:
            self.cancelled[number] = error
            if entry.prompt.text == "hold, raise on cancel":
                raise RuntimeError("secret of the cancel")

        if self.session.open(number, on_cancel, remaining_ms=entry.remaining_ms):
            self._answer(number, entry.prompt.text)
        else:
            self.duplicates.append(number)

    def _answer(self, number: int, text: str) -> None:
        word, _, rest = text.partition(" ")
        if word.startswith("hold"):
            return
        if word == "boom":
            raise RuntimeError("secret of the handler")
        if word == "fail":
            self.session.fail(number, BY_REASON[rest]("as asked", field="prompt", limit=7))
            return
        data = b"x" * int(rest) if word == "size" else text.encode()
        self.session.close(number)
        self.result(number, data)

    def result(self, number: int, data: bytes, lane: Lane = Lane.CONTROL) -> None:
        """Send one answer, whatever the state of its entry."""
        result = TokenizeResult(entry_id=number, token_ids=data)
        self.session.send(AttachResponse(results=[result]), lane)

    def on_closed(self, error: MeshError) -> None:
        self.closed_by = error
        self.closed.set()

    def on_feed_dropped(self) -> None:
        self.feed_drops += 1


class EchoService(TokenizerServiceServicer):
    """A servicer whose plain RPCs are not there."""

    def __init__(self, limits: LinkLimits = FAST, instance_id: str = "echo-1") -> None:
        self.identity = Identity("tokenizer", instance_id)
        self.limits = limits
        self.handlers: list[EchoHandler] = []
        self.attached = asyncio.Event()

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await serve_link(
            request_iterator,
            context,
            up=AttachResponse,
            identity=self.identity,
            accept=self._accept,
            limits=self.limits,
        )

    def _accept(self, session: Session[AttachResponse]) -> EchoHandler:
        handler = EchoHandler(session)
        self.handlers.append(handler)
        self.attached.set()
        return handler

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetTokenizer(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@asynccontextmanager
async def serve_echo(
    service: EchoService, address: str = "127.0.0.1:0"
) -> AsyncGenerator[Server, None]:
    """Run an echo service; yields its server, whose `port` is bound."""
    server = Server(
        address,
        [
            (
                SERVICE,
                lambda grpc_server: add_TokenizerServiceServicer_to_server(service, grpc_server),
            )
        ],
    )
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def until(condition: Callable[[], bool]) -> None:
    """Give way to the loop until something holds."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - what it looks at has no event
            await asyncio.sleep(0.005)


class Answer:
    """A sink: what an entry was answered, or how it failed."""

    def __init__(self) -> None:
        self._came: asyncio.Future[bytes | MeshError] = asyncio.get_running_loop().create_future()
        self.failures = 0

    def on_answer(self, data: bytes) -> None:
        self._came.set_result(data)

    def on_failed(self, error: MeshError) -> None:
        self.failures += 1
        if not self._came.done():
            self._came.set_result(error)

    def done(self) -> bool:
        return self._came.done()

    async def get(self) -> bytes:
        """The answer; raises the entry's failure."""
        came = await self._came
        if isinstance(came, MeshError):
            raise came
        return came

    async def error(self) -> MeshError:
        """The failure; AssertionError when it was answered instead."""
        came = await self._came
        assert isinstance(came, MeshError), f"answered {came[:50]!r}"
        return came


class EchoListener:
    """The router's side: gives answers to their sinks and remembers ups and downs."""

    def __init__(self) -> None:
        self.link: EchoLink | None = None
        self.ups: list[tuple[Peer, bool]] = []
        self.downs: list[MeshError] = []
        self.infos = 0
        self.stray = 0
        self.up = asyncio.Event()
        self.down = asyncio.Event()

    def on_up(self, peer: Peer, *, is_new: bool) -> None:
        self.ups.append((peer, is_new))
        self.down.clear()
        self.up.set()

    def on_frame(self, frame: AttachResponse) -> None:
        self.infos += frame.HasField("info")
        for result in frame.results:
            sink = self.link.close(result.entry_id) if self.link else None
            if sink:
                sink.on_answer(result.token_ids)
            else:
                self.stray += 1

    def on_down(self, error: MeshError) -> None:
        self.downs.append(error)
        self.up.clear()
        self.down.set()


def ask(link: EchoLink, text: str, *, timeout_s: float | None = None, tell: bool = True) -> Answer:
    """Send one entry; `tell` tells the service of the timeout, too."""
    answer = Answer()
    number = link.open(answer, timeout_s=timeout_s)
    entry = TokenizeEntry(entry_id=number)
    entry.prompt.text = text
    if tell and timeout_s:
        entry.remaining_ms = int(timeout_s * 1000)
    link.send(AttachRequest(tokenize=[entry]), Lane.WORK, entry_id=number)
    return answer


@asynccontextmanager
async def dial(
    address: str, *, limits: LinkLimits = FAST, wait: bool = True
) -> AsyncGenerator[tuple[EchoLink, EchoListener], None]:
    """Run a link to an echo service; with `wait`, until it is up."""
    listener = EchoListener()
    link: EchoLink = Link(
        address,
        attach=attach,
        down=AttachRequest,
        listener=listener,
        identity=Identity("router", "router-1"),
        limits=limits,
    )
    listener.link = link
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(link.run())
        try:
            if wait:
                async with asyncio.timeout(5):
                    await listener.up.wait()
            yield link, listener
        finally:
            running.cancel()


def attach(
    channel: grpc.aio.Channel,
) -> grpc.aio.StreamStreamMultiCallable[AttachRequest, AttachResponse]:
    """The stub's Attach."""
    return TokenizerServiceStub(channel).Attach
