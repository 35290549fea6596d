"""Errors over real RPCs: every reason reaches the client as the class that was raised."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from radixmesh.errors import BY_REASON, InternalError, MeshError, QueueFull
from radixmesh.rpc.channel import open_channel
from radixmesh.rpc.interceptors import REQUEST_ID_KEY, ErrorInterceptor
from radixmesh.rpc.server import Server
from radixmesh.rpc.status import from_rpc_error
from radixmesh.telemetry.logs import request_id

SERVICE = "test.Errors"
KINDS = sorted(BY_REASON.values(), key=lambda kind: kind.reason)
SECRET = "the password is 1234"

Context = grpc.aio.ServicerContext[bytes, bytes]


class Errors:
    """Handlers of all four shapes that answer twice where they stream, then do as told."""

    def __init__(self) -> None:
        self.act: Callable[[], None] = lambda: None
        self.released = asyncio.Event()
        self.endless = False
        self.request_ids: list[str] = []

    async def unary_unary(self, request: bytes, context: Context) -> bytes:
        self.request_ids.append(request_id.get())
        self.act()
        return request

    async def stream_unary(self, requests: AsyncIterator[bytes], context: Context) -> bytes:
        joined = b"".join([request async for request in requests])
        self.act()
        return joined

    async def unary_stream(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        try:
            yield b"first"
            yield b"second"
            while self.endless:
                yield b"x" * 10_000
            self.act()
        finally:
            self.released.set()

    async def stream_stream(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request
        self.act()

    async def writing(self, request: bytes, context: Context) -> None:
        await context.write(b"first")
        await context.write(b"second")
        self.act()

    async def aborting(self, request: bytes, context: Context) -> bytes:
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, "my own words")
        return b""

    def register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, Any] = {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(self.unary_unary),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(self.stream_unary),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(self.unary_stream),
            "StreamStream": grpc.stream_stream_rpc_method_handler(self.stream_stream),
            "Writing": grpc.unary_stream_rpc_method_handler(self.writing),
            "Aborting": grpc.unary_unary_rpc_method_handler(self.aborting),
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        server.add_generic_rpc_handlers((generic,))


# How many messages each shape sends before the error.
SHAPES = {"UnaryUnary": 0, "StreamUnary": 0, "UnaryStream": 2, "StreamStream": 2, "Writing": 2}


class Mesh:
    """A server of `Errors` and a channel to it."""

    def __init__(self, errors: Errors, channel: grpc.aio.Channel) -> None:
        self.errors = errors
        self.channel = channel

    def call(self, shape: str, **options: Any) -> Any:
        """Begin a call of a shape; streams of requests are `first`, `second`."""
        method = f"/{SERVICE}/{shape}"

        async def requests() -> AsyncIterator[bytes]:
            yield b"first"
            yield b"second"

        channel: Any = self.channel
        if shape == "StreamUnary":
            return channel.stream_unary(method)(requests(), **options)
        if shape == "StreamStream":
            return channel.stream_stream(method)(requests(), **options)
        if shape in ("UnaryStream", "Writing"):
            return channel.unary_stream(method)(b"x", **options)
        return channel.unary_unary(method)(b"x", **options)


@asynccontextmanager
async def served() -> AsyncGenerator[Mesh, None]:
    errors = Errors()
    server = Server("127.0.0.1:0", [(SERVICE, errors.register)])
    port = await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield Mesh(errors, channel)
    finally:
        await server.stop()


async def outcome(call: Any) -> tuple[list[bytes], grpc.aio.AioRpcError | None]:
    """What came before the error, and the error."""
    got: list[bytes] = []
    try:
        if hasattr(call, "read"):
            async for message in call:
                got.append(message)  # noqa: PERF401 - keeps what came before an error
        else:
            got.append(await call)
    except grpc.aio.AioRpcError as error:
        return got, error
    return got, None


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


async def test_every_reason_reaches_the_client_as_its_own_class_from_every_shape() -> None:
    async with served() as mesh:
        for kind in KINDS:
            sent = kind("what happened", field="sampling.top_p", retry_after_s=0.5, limit=7)
            mesh.errors.act = raising(sent)
            for shape, before in SHAPES.items():
                got, error = await outcome(mesh.call(shape))
                assert error is not None, shape
                assert error.code().name == kind.code, shape
                assert got == [b"first", b"second"][:before], shape
                heard = from_rpc_error(error)
                assert type(heard) is kind, shape
                assert vars(heard) == vars(sent), shape


async def test_an_escaping_exception_reaches_the_client_as_an_id_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as mesh:
        mesh.errors.act = raising(RuntimeError(SECRET))
        for shape in SHAPES:
            caplog.clear()
            _, error = await outcome(mesh.call(shape))
            assert error is not None
            heard = from_rpc_error(error)
            assert type(heard) is InternalError, shape
            assert error.code() is grpc.StatusCode.INTERNAL
            assert SECRET not in str(error)
            assert "RuntimeError" not in str(error)
            logged = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert [vars(record)["error_id"] for record in logged] == [heard.metadata["error_id"]]
            assert logged[0].exc_info
            assert SECRET in str(logged[0].exc_info[1])


async def test_calls_that_go_well_are_left_alone() -> None:
    async with served() as mesh:
        results = {shape: await outcome(mesh.call(shape)) for shape in SHAPES}
    both = [b"first", b"second"]
    assert results == {
        "UnaryUnary": ([b"x"], None),
        "StreamUnary": ([b"firstsecond"], None),
        "UnaryStream": (both, None),
        "StreamStream": (both, None),
        "Writing": (both, None),
    }


async def test_a_handler_that_aborts_by_itself_keeps_its_words() -> None:
    async with served() as mesh:
        _, error = await outcome(mesh.call("Aborting"))
        assert error is not None
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        assert error.details() == "my own words"


async def test_an_unknown_method_is_not_supported() -> None:
    async with served() as mesh:
        _, error = await outcome(mesh.call("Nothing"))
        assert error is not None
        assert from_rpc_error(error).reason == "NOT_SUPPORTED"


async def test_a_client_that_leaves_a_stream_it_does_not_read_releases_the_generator() -> None:
    async with served() as mesh:
        mesh.errors.endless = True
        call = mesh.call("UnaryStream")
        assert await call.read() == b"first"
        call.cancel()
        await asyncio.wait_for(mesh.errors.released.wait(), 5)


async def test_the_longest_error_still_fits_into_the_headers() -> None:
    async with served() as mesh:
        long = "ä\n" * 5000
        sent = QueueFull(long, field=long)
        sent.metadata = {f"{n} {long}": long for n in range(30)}
        mesh.errors.act = raising(sent)
        _, error = await outcome(mesh.call("UnaryUnary"))
        assert error is not None
        heard = from_rpc_error(error)
        assert type(heard) is QueueFull
        assert long.startswith(heard.message.removesuffix("..."))


async def test_the_callers_request_id_goes_through_and_comes_back() -> None:
    async with served() as mesh:
        for act in (lambda: None, raising(QueueFull("full"))):
            mesh.errors.act = act
            call = mesh.call("UnaryUnary", metadata=((REQUEST_ID_KEY, "r-17"),))
            await outcome(call)
            trailing = dict(await call.trailing_metadata())
            assert trailing[REQUEST_ID_KEY] == "r-17"
        assert mesh.errors.request_ids == ["r-17", "r-17"]


async def test_a_call_without_a_request_id_gets_one() -> None:
    async with served() as mesh:
        await outcome(mesh.call("UnaryUnary"))
        assert len(mesh.errors.request_ids[0]) == 32


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        _, error = await outcome(Mesh(Errors(), channel).call("UnaryUnary", timeout=5))
        assert error is not None
        assert from_rpc_error(error).reason == "SERVICE_UNAVAILABLE"


def test_the_sync_client_reads_the_same_error() -> None:
    async def listen() -> tuple[Server, int]:
        errors = Errors()
        errors.act = raising(QueueFull("full", limit=7))
        server = Server("127.0.0.1:0", [(SERVICE, errors.register)])
        return server, await server.start()

    async def main() -> MeshError:
        server, port = await listen()
        try:
            return await asyncio.to_thread(call_sync, port)
        finally:
            await server.stop()

    heard = asyncio.run(main())
    assert type(heard) is QueueFull
    assert heard.metadata == {"limit": "7"}


def call_sync(port: int) -> MeshError:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            method: Any = channel.unary_unary(f"/{SERVICE}/UnaryUnary")
            method(b"", timeout=5)
        except grpc.RpcError as error:
            return from_rpc_error(error)
    raise AssertionError("no error")


class Gone:
    """A call whose client left before its status could be sent."""

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    def invocation_metadata(self) -> tuple[()]:
        return ()

    async def abort(self, *args: object) -> None:
        raise grpc.aio.InternalError("the batch failed")


async def test_a_status_for_a_client_that_has_just_left_is_a_cancel_and_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(request: bytes, context: Context) -> bytes:
        raise QueueFull("full")

    async def lookup(details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(refuse)

    details: Any = SimpleNamespace(method="/test/Refuse")
    handler: Any = await ErrorInterceptor().intercept_service(lookup, details)
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(b"", Gone())
    assert not caplog.records
