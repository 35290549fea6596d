"""Links whose peer dies, freezes, lies or doesn't read. A TCP proxy cuts and freezes."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from radixmesh.errors import LinkLost, LinkOverloaded
from radixmesh.rpc.channel import open_channel
from radixmesh.rpc.frames import hello
from radixmesh.rpc.link import Identity, Lane, LinkLimits
from radixmesh.tokenizer.v1.tokenizer_service_pb2 import (
    AttachRequest,
    AttachResponse,
    TokenizeEntry,
)
from tests.fakes.echo_link import (
    FAST,
    EchoLink,
    EchoService,
    ask,
    attach,
    dial,
    serve_echo,
    until,
)
from tests.fakes.tcp_proxy import proxy_to

ROUTER = Identity("router", "router-1")


class Deaf(EchoService):
    """Says hello and never reads again."""

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await anext(aiter(request_iterator))
        await context.write(hello(AttachResponse, self.identity, FAST))
        self.attached.set()
        await asyncio.Event().wait()


class Silent(EchoService):
    """Takes the stream and says nothing, not even hello."""

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.attached.set()
        await asyncio.Event().wait()


class FromTheFuture(EchoService):
    """Speaks another version of the protocol."""

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        frame = hello(AttachResponse, self.identity, FAST)
        frame.link.hello.protocol_version = 2
        await context.write(frame)
        await asyncio.Event().wait()


async def read_to_end(call: grpc.aio.StreamStreamCall[AttachRequest, AttachResponse]) -> None:
    """Read until the stream ends; raises its status."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def flood(link: EchoLink, text: str) -> None:
    """Send requests until the link refuses."""
    while True:
        ask(link, text)
        await asyncio.sleep(0)


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def refusals(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == logging.ERROR]


@asynccontextmanager
async def raw_call(
    port: int,
) -> AsyncGenerator[grpc.aio.StreamStreamCall[AttachRequest, AttachResponse], None]:
    """A stream to an echo service that nobody pumps."""
    channel = open_channel(f"127.0.0.1:{port}")
    call = attach(channel)()
    try:
        yield call
    finally:
        call.cancel()
        await channel.close()


async def test_a_peer_that_is_cut_off_fails_its_own_entries_once_and_no_others() -> None:
    service = EchoService()
    async with (
        serve_echo(service) as server,
        proxy_to(server.port) as proxy,
        dial(f"127.0.0.1:{proxy.port}") as (link, listener),
        dial(f"127.0.0.1:{server.port}") as (other, other_listener),
    ):
        held = [ask(link, "hold") for _ in range(50)]
        others = [ask(other, "hold") for _ in range(50)]
        assert await ask(link, "seen").get() == b"seen"
        proxy.cut()
        errors = [await answer.error() for answer in held]
        assert all(type(error) is LinkLost for error in errors)
        assert [answer.failures for answer in held] == [1] * 50
        assert len(listener.downs) == 1
        assert not any(answer.done() for answer in others)
        assert not other_listener.downs
        await listener.up.wait()
        assert await ask(link, "again").get() == b"again"
        cut, alive = service.handlers[0], service.handlers[1]
        await asyncio.wait_for(cut.closed.wait(), 5)
        assert cut.session.entry_count == 0
        assert len(cut.cancelled) == 50
        assert alive.session.entry_count == 50


async def test_a_cut_in_the_middle_of_a_frame_delivers_nothing_of_it() -> None:
    async with (
        serve_echo(EchoService()) as server,
        proxy_to(server.port) as proxy,
        dial(f"127.0.0.1:{proxy.port}") as (link, listener),
    ):
        await ask(link, "first").get()
        proxy.cut_after(100_000)
        answer = ask(link, "size 300000")
        assert isinstance(await answer.error(), LinkLost)
        assert answer.failures == 1
        assert proxy.was_cut.is_set()
        await listener.up.wait()
        assert await ask(link, "size 300000").get() == b"x" * 300_000
        assert listener.stray == 0


async def test_a_frozen_connection_is_noticed_by_both_ends_within_the_peer_timeout() -> None:
    service = EchoService()
    async with (
        serve_echo(service) as server,
        proxy_to(server.port) as proxy,
        dial(f"127.0.0.1:{proxy.port}") as (link, listener),
    ):
        held = ask(link, "hold")
        await ask(link, "seen").get()
        proxy.freeze()
        started = time.monotonic()
        error = await held.error()
        handler = service.handlers[0]
        await asyncio.wait_for(handler.closed.wait(), 5)
        took = time.monotonic() - started
        assert isinstance(error, LinkLost)
        assert "silent" in error.message
        assert FAST.peer_timeout_s - FAST.heartbeat_s <= took < 3 * FAST.peer_timeout_s
        assert isinstance(handler.cancelled[1], LinkLost)
        proxy.thaw()
        await listener.up.wait()
        assert await ask(link, "again").get() == b"again"


async def test_a_dial_that_is_never_answered_ends_within_the_connect_timeout() -> None:
    async with (
        serve_echo(EchoService()) as server,
        proxy_to(server.port) as proxy,
    ):
        proxy.freeze()
        async with dial(f"127.0.0.1:{proxy.port}", wait=False) as (link, listener):
            await until(lambda: proxy.accepted >= 2)  # each dial is a new connection
            assert not link.connected
            assert not listener.ups
            proxy.thaw()
            async with asyncio.timeout(5):
                await listener.up.wait()


async def test_a_peer_that_never_says_hello_is_dialled_again() -> None:
    service = Silent()
    async with serve_echo(service) as server, dial(f"127.0.0.1:{server.port}", wait=False):
        await asyncio.wait_for(service.attached.wait(), 5)
        service.attached.clear()
        await asyncio.wait_for(service.attached.wait(), 5)


async def test_a_service_drops_a_caller_that_never_says_hello() -> None:
    service = EchoService()
    async with serve_echo(service) as server, raw_call(server.port) as call:
        await call.wait_for_connection()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 5)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert not service.handlers


async def test_a_first_frame_without_hello_is_refused() -> None:
    service = EchoService()
    async with serve_echo(service) as server, raw_call(server.port) as call:
        await call.write(AttachRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not service.handlers


async def test_names_too_long_for_a_log_line_are_refused() -> None:
    service = EchoService()
    async with serve_echo(service) as server, raw_call(server.port) as call:
        await call.write(hello(AttachRequest, replace(ROUTER, name="x" * 300), FAST))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not service.handlers


async def test_a_second_hello_ends_the_link() -> None:
    service = EchoService()
    async with serve_echo(service) as server, raw_call(server.port) as call:
        for _ in range(2):
            await call.write(hello(AttachRequest, ROUTER, FAST))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_service_of_another_version_is_refused_with_a_clear_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        serve_echo(FromTheFuture()) as server,
        dial(f"127.0.0.1:{server.port}", wait=False) as (link, listener),
    ):
        await until(lambda: bool(refusals(caplog)))
        assert "version 2 is not spoken here" in str(vars(refusals(caplog)[0])["error"])
        assert not listener.ups
        assert not link.connected


async def test_a_router_of_another_version_is_refused_with_a_status() -> None:
    async with serve_echo(EchoService()) as server, raw_call(server.port) as call:
        frame = hello(AttachRequest, ROUTER, FAST)
        frame.link.hello.protocol_version = 9
        await call.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED
        assert "version 9" in (caught.value.details() or "")


async def test_a_service_that_does_not_read_cannot_grow_the_routers_memory() -> None:
    limits = replace(FAST, max_pending_bytes=1_000_000, peer_timeout_s=30)
    async with (
        serve_echo(Deaf()) as server,
        dial(f"127.0.0.1:{server.port}", limits=limits) as (link, _),
    ):
        with pytest.raises(LinkOverloaded):
            await flood(link, "x" * 50_000)
        assert link.pending_bytes <= 1_000_000
        assert link.connected
        for number in list(link.entries):
            link.cancel(number)
        # What was never sent is gone; cancels of the rest are all that waits.
        assert link.pending_bytes < 200_000


async def test_cancels_that_find_no_room_end_the_link() -> None:
    limits = replace(FAST, max_pending_bytes=20_000, peer_timeout_s=30)
    service = Deaf()
    async with (
        serve_echo(service) as server,
        dial(f"127.0.0.1:{server.port}", limits=limits) as (link, listener),
    ):
        answers = [ask(link, "hold") for _ in range(200)]
        while link.pending_bytes:  # noqa: ASYNC110 - until all of them were written
            await asyncio.sleep(0)
        stray = AttachRequest(tokenize=[TokenizeEntry(entry_id=1)] * 100)
        while link.connected:
            try:
                link.send(stray, Lane.WORK)
            except LinkOverloaded:
                break
            await asyncio.sleep(0)
        for number in list(link.entries):
            link.cancel(number)
        await asyncio.wait_for(listener.down.wait(), 5)
        assert isinstance(listener.downs[0], LinkOverloaded)
        assert not any(answer.done() for answer in answers)


async def test_a_router_that_does_not_read_results_loses_its_link() -> None:
    limits = LinkLimits(max_pending_bytes=1_000_000, peer_timeout_s=30)
    service = EchoService(limits)
    async with serve_echo(service) as server, raw_call(server.port) as call:
        await call.write(hello(AttachRequest, ROUTER, limits))
        await asyncio.wait_for(service.attached.wait(), 5)
        handler = service.handlers[0]
        most = 0
        while not handler.session.closed:
            handler.result(1, b"x" * 50_000)
            most = max(most, handler.session.pending_bytes)
            await asyncio.sleep(0)
        await asyncio.wait_for(handler.closed.wait(), 5)
        assert isinstance(handler.closed_by, LinkOverloaded)
        assert most <= 1_000_000
        assert handler.session.pending_bytes == 0
        handler.result(1, b"after the end")
        assert handler.session.pending_bytes == 0


async def test_a_router_that_does_not_read_the_feed_loses_feed_and_keeps_results(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = LinkLimits(max_feed_bytes=500_000, peer_timeout_s=30)
    service = EchoService(limits)
    async with serve_echo(service) as server, raw_call(server.port) as call:
        await call.write(hello(AttachRequest, ROUTER, limits))
        await asyncio.wait_for(service.attached.wait(), 5)
        handler = service.handlers[0]
        sent, most = 400, 0
        for number in range(1, sent + 1):
            handler.result(0, b"f" * 50_000, Lane.FEED)
            handler.result(number, b"r", Lane.CONTROL)
            most = max(most, handler.session.feed_bytes)
            await asyncio.sleep(0)
        assert most <= 500_000
        results: list[int] = []
        while len(results) < sent:
            frame: Any = await asyncio.wait_for(call.read(), 5)
            results += [item.entry_id for item in frame.results if item.entry_id]
        assert results == list(range(1, sent + 1))
        assert not handler.session.closed
        drops = [record for record in caplog.records if record.message == "feed dropped"]
        assert handler.feed_drops == len(drops) >= 1
        handler.result(0, b"anew", Lane.FEED)
        frame = await asyncio.wait_for(call.read(), 5)
        while frame.results[-1].token_ids != b"anew":
            frame = await asyncio.wait_for(call.read(), 5)


async def test_fragments_without_end_are_bounded() -> None:
    limits = replace(FAST, max_incomplete_bytes=100_000)
    service = EchoService(limits)
    async with serve_echo(service) as server, raw_call(server.port) as call:
        await call.write(hello(AttachRequest, ROUTER, FAST))
        frame = AttachRequest()
        frame.link.fragments.add(fragment_id=1, data=b"x" * 60_000)
        for _ in range(2):
            await call.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_fragments_that_make_no_frame_end_the_link_and_are_no_bug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serve_echo(EchoService()) as server, raw_call(server.port) as call:
        await call.write(hello(AttachRequest, ROUTER, FAST))
        frame = AttachRequest()
        frame.link.fragments.add(fragment_id=1, data=b"\xff\xff", last=True)
        await call.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_to_end(call)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_restarted_service_is_another_instance_and_the_same_one_is_not() -> None:
    service = EchoService(instance_id="first")
    async with serve_echo(service) as server:
        port = server.port
        async with proxy_to(port) as proxy, dial(f"127.0.0.1:{proxy.port}") as (_, listener):
            proxy.cut()
            await listener.down.wait()
            await listener.up.wait()
            service.identity = Identity("tokenizer", "second")
            proxy.cut()
            await listener.down.wait()
            await listener.up.wait()
            heard = [(peer.instance_id, is_new) for peer, is_new in listener.ups]
    assert heard == [("first", True), ("first", False), ("second", True)]


async def test_a_link_waits_for_a_service_that_is_not_there_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = EchoService()
    async with serve_echo(first) as server:
        address = f"127.0.0.1:{server.port}"
    async with dial(address, wait=False) as (link, listener):
        await until(lambda: alarms(caplog) == ["link down"])
        assert not link.connected
        async with serve_echo(EchoService(), address), asyncio.timeout(5):
            await listener.up.wait()
            assert await ask(link, "here").get() == b"here"


async def test_a_process_that_stood_still_does_not_blame_its_peer() -> None:
    async with (
        serve_echo(EchoService()) as server,
        dial(f"127.0.0.1:{server.port}") as (link, listener),
    ):
        await ask(link, "before").get()
        time.sleep(FAST.peer_timeout_s + 0.2)  # noqa: ASYNC251 - the standstill
        assert await ask(link, "after").get() == b"after"
        await asyncio.sleep(2 * FAST.heartbeat_s)
        assert not listener.downs


async def test_an_address_that_can_not_be_dialled_ends_nothing_else() -> None:
    async with serve_echo(EchoService()) as server, dial("\ud800:1", wait=False) as (link, _):
        await asyncio.sleep(0)
        async with dial(f"127.0.0.1:{server.port}") as (other, _):
            assert other.connected
            assert not link.connected
