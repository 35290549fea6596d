"""A tokenizer and a detokenizer that live, take everything and answer nothing."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from radixmesh.detokenizer.v1 import detokenizer_service_pb2 as detokenizer_pb
from radixmesh.detokenizer.v1 import detokenizer_service_pb2_grpc as detokenizer_grpc
from radixmesh.errors import MeshError, NotSupported
from radixmesh.models import tokenizer_fingerprint
from radixmesh.rpc.link import Identity, Lane, Session, serve_link
from radixmesh.rpc.server import Server
from radixmesh.tokenizer.v1 import tokenizer_service_pb2 as tokenizer_pb
from radixmesh.tokenizer.v1 import tokenizer_service_pb2_grpc as tokenizer_grpc
from tests.fakes.worker import FAST

Frame = Any  # of either service


class Silent:
    """What a silent service has been asked.

    Attributes:
        port: Where it listens.
        opened: Entries that were begun.
        cancelled: Those that were given up.
    """

    def __init__(self, first: Frame) -> None:
        self.port = 0
        self.opened: list[int] = []
        self.cancelled: list[int] = []
        self.session: Session[Frame] | None = None
        self._first = first

    async def serve(self, requests: Any, context: Any) -> None:
        """Serve one link."""
        identity = Identity("silent", "one")
        up = type(self._first)
        await serve_link(
            requests, context, up=up, identity=identity, accept=self._accept, limits=FAST
        )

    def _accept(self, session: Session[Frame]) -> "Silent":
        self.session = session
        session.send(self._first, Lane.CONTROL)
        return self

    def on_frame(self, frame: Frame) -> None:
        begun = frame.tokenize if hasattr(frame, "tokenize") else frame.opens
        for entry in begun:
            self._open(entry.entry_id)

    def _open(self, entry_id: int) -> None:
        assert self.session is not None
        self.opened.append(entry_id)
        self.session.open(entry_id, lambda _: self.cancelled.append(entry_id))

    def on_closed(self, error: MeshError) -> None:
        """The router has left."""

    def on_feed_dropped(self) -> None:
        """There is no feed."""


class _Tokenizer(tokenizer_grpc.TokenizerServiceServicer):
    def __init__(self, silent: Silent) -> None:
        self._silent = silent

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._silent.serve(request_iterator, context)

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("it speaks on links only")

    async def Detokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("it speaks on links only")

    async def GetTokenizer(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("it speaks on links only")


class _Detokenizer(detokenizer_grpc.DetokenizerServiceServicer):
    def __init__(self, silent: Silent) -> None:
        self._silent = silent

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self._silent.serve(request_iterator, context)

    async def Decode(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("it speaks on links only")


@asynccontextmanager
async def silent_tokenizer(model_dir: Path) -> AsyncGenerator[Silent]:
    """Run one that serves the model `tiny`."""
    info = tokenizer_pb.TokenizerInfo(model="tiny", fingerprint=tokenizer_fingerprint(model_dir))
    silent = Silent(tokenizer_pb.AttachResponse(info=info))
    add = partial(tokenizer_grpc.add_TokenizerServiceServicer_to_server, _Tokenizer(silent))
    name = tokenizer_pb.DESCRIPTOR.services_by_name["TokenizerService"].full_name
    async with _listening(silent, name, add):
        yield silent


@asynccontextmanager
async def silent_detokenizer(model_dir: Path) -> AsyncGenerator[Silent]:
    """Run one that serves the model `tiny`."""
    fingerprint = tokenizer_fingerprint(model_dir)
    info = detokenizer_pb.DetokenizerInfo(model="tiny", fingerprint=fingerprint)
    silent = Silent(detokenizer_pb.AttachResponse(info=info))
    add = partial(detokenizer_grpc.add_DetokenizerServiceServicer_to_server, _Detokenizer(silent))
    name = detokenizer_pb.DESCRIPTOR.services_by_name["DetokenizerService"].full_name
    async with _listening(silent, name, add):
        yield silent


@asynccontextmanager
async def _listening(silent: Silent, name: str, add: Callable[..., None]) -> AsyncGenerator[None]:
    server = Server("127.0.0.1:0", [(name, add)])
    silent.port = await server.start()
    try:
        yield
    finally:
        await server.stop()
