"""The HTTP listener: what its connections are like. A real port on loopback."""

import asyncio
import socket

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from router.edge.listener import HttpListener


async def test_the_end_of_an_answer_does_not_wait_for_the_clients_acknowledgement() -> None:
    listener = HttpListener(PlainTextResponse("hi"), "127.0.0.1", 0)
    port = await listener.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        assert (await client.get("/")).text == "hi"
        (connection,) = listener._server.server_state.connections
        assert connection.transport is not None
        accepted = connection.transport.get_extra_info("socket")
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await listener.stop(grace_s=1.0)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body, after a while."""
    body = await Request(scope, receive).body()
    await asyncio.sleep(0.5)
    await PlainTextResponse(str(len(body)))(scope, receive, send)


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"POST / HT",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nab",
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\nGET / HT",
    ],
    ids=["nothing", "half a head", "half a body", "a request and half a head"],
)
async def test_who_does_not_finish_a_request_is_cut_off(beginning: bytes) -> None:
    listener = HttpListener(echo, "127.0.0.1", 0, request_s=0.2)
    port = await listener.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(beginning)
    async with asyncio.timeout(3):
        try:
            rest = await reader.read()
        except ConnectionResetError:
            rest = b""
    assert rest.count(b"200 OK") == beginning.count(b"GET / HTTP/1.1")
    assert not listener._server.server_state.connections
    writer.close()
    await listener.stop(grace_s=1.0)


async def test_an_answer_may_take_longer_than_a_request() -> None:
    listener = HttpListener(echo, "127.0.0.1", 0, request_s=0.2)
    port = await listener.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        for _ in range(2):
            assert (await client.post("/", content=b"12345")).text == "5"
    await listener.stop(grace_s=1.0)
