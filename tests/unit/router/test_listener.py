"""The HTTP listener: what its connections are like. A real port on loopback."""

import socket

import httpx
from starlette.responses import PlainTextResponse

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
