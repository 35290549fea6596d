"""Clients that stop reading, over real connections: bounded, told, and nobody else's trouble."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from radixmesh.router.v1 import router_service_pb2 as pb
from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceStub
from radixmesh.rpc.status import from_rpc_error
from tests.fakes.router_mesh import RouterMesh, eventually, run_mesh

PROMPT = "Once upon a time there was a router."
# Small windows, so that a client that stops reading is felt soon.
NARROW = (
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16_384),
    ("grpc.use_local_subchannel_pool", 1),
)
CHOICES, COUNT = 16, 400
ENDLESS: dict[str, Any] = {
    "text": PROMPT,
    "choice_count": CHOICES,
    "sampling": {"max_tokens": COUNT, "logprobs": True},
}
SMALL: dict[str, Any] = {"client_buffer_bytes": 4096, "max_concurrent": 8}


async def read_first(call: Any) -> list[pb.GenerateResponse]:
    return [await anext(aiter(call))]


@asynccontextmanager
async def narrow(mesh: RouterMesh) -> AsyncGenerator[Any]:
    address = f"127.0.0.1:{mesh.ports.grpc}"
    async with grpc.aio.insecure_channel(address, options=NARROW) as channel:
        yield RouterServiceStub(channel)


def ask_http(mesh: RouterMesh) -> socket.socket:
    """Send a request for a long stream on a socket that nobody reads."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", mesh.ports.http))
    # Sockets hold more than HTTP/2's windows: megabytes.
    asked = {"model": "tiny", "prompt": PROMPT, "n": CHOICES, "max_tokens": 2500, "logprobs": 0}
    body = json.dumps({**asked, "stream": True}).encode()
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body)
    )
    connection.sendall(head + body)
    return connection


async def the_rest(call: Any) -> tuple[int, str]:
    """Read a call to its end: how many messages came, and the reason of its error."""
    count = 0
    try:
        async for _ in call:
            count += 1
    except grpc.aio.AioRpcError as error:
        return count, from_rpc_error(error).reason
    return count, ""


async def test_a_grpc_client_that_stops_reading_frees_the_worker_and_is_told_when_it_reads(
    model_dir: Path,
) -> None:
    async with run_mesh(model_dir, write_timeout_s=0.5, **SMALL) as mesh, narrow(mesh) as stub:
        call = stub.Generate(pb.GenerateRequest(**ENDLESS), timeout=60)
        await read_first(call)
        # Others go on meanwhile.
        other = await mesh.generate("another prompt", 40)
        assert other.text == mesh.text.output("another prompt", 40)
        await eventually(lambda: bool(mesh.workers) and mesh.running == 0, timeout_s=15)
        # It was cancelled, not finished.
        assert sum(len(worker.cancelled) for worker in mesh.workers) > 0
        await mesh.until_nothing_is_held(5)
        count, reason = await the_rest(call)
        assert count > 0
        assert reason == "SLOW_CONSUMER"


async def test_an_http_client_that_stops_reading_is_let_go(model_dir: Path) -> None:
    async with run_mesh(model_dir, write_timeout_s=0.5, **SMALL) as mesh:
        connection = ask_http(mesh)
        try:
            await eventually(lambda: mesh.running > 0)
            other = await mesh.generate("another prompt", 40)
            assert other.text == mesh.text.output("another prompt", 40)
            await eventually(lambda: mesh.running == 0, timeout_s=15)
            assert sum(len(worker.cancelled) for worker in mesh.workers) > 0
            await mesh.until_nothing_is_held(5)
            # The connection does not stay though its client never reads what waits in it.
            await eventually(lambda: not held_by_us(connection), timeout_s=10)
        finally:
            connection.close()


def held_by_us(client: socket.socket) -> bool:
    """Whether this process, which serves too, holds the other end of a connection."""
    ours = psutil.Process().net_connections("tcp")
    return any(one.raddr == client.getsockname() for one in ours)


async def test_a_client_that_reads_slowly_but_steadily_gets_everything(model_dir: Path) -> None:
    flags: dict[str, Any] = {"client_buffer_bytes": 1 << 20, "write_timeout_s": 5.0}
    async with run_mesh(model_dir, **flags) as mesh, narrow(mesh) as stub:
        wanted: dict[str, Any] = {**ENDLESS, "choice_count": 4}
        call = stub.Generate(pb.GenerateRequest(**wanted), timeout=60)
        ids: dict[int, list[int]] = {}
        async for message in call:
            if message.HasField("delta"):
                ids.setdefault(message.delta.choice, []).extend(message.delta.token_ids)
                if len(ids[message.delta.choice]) % 16 == 0:
                    # Slower than the model, and what waits merges.
                    await asyncio.sleep(0.01)
        expected = mesh.text.output_ids(PROMPT, COUNT)
        assert ids == dict.fromkeys(range(4), expected)
        await mesh.until_nothing_is_held()


async def test_many_that_stop_reading_do_not_use_up_the_permits(model_dir: Path) -> None:
    flags: dict[str, Any] = {**SMALL, "max_concurrent": 2, "write_timeout_s": 0.3}
    async with run_mesh(model_dir, **flags) as mesh, narrow(mesh) as stub:
        calls = [stub.Generate(pb.GenerateRequest(**ENDLESS), timeout=60) for _ in range(2)]
        for call in calls:
            await read_first(call)
        got = await mesh.generate("another prompt", 10, timeout_s=15)
        assert got.text == mesh.text.output("another prompt", 10)
        for call in calls:
            call.cancel()
        await mesh.until_nothing_is_held(5)
