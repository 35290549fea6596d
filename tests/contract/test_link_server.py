"""Servers: health, reflection, ports, draining."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from radixmesh.errors import LinkLost
from radixmesh.rpc.channel import open_channel
from radixmesh.rpc.server import Server
from tests.fakes.echo_link import SERVICE, EchoService, ask, dial, serve_echo
from tests.fakes.tcp_proxy import proxy_to

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(port: int, name: str) -> int:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        return int(answer.status)


async def test_a_process_lives_before_its_service_is_ready() -> None:
    async with serve_echo(EchoService()) as server:
        assert await health_of(server.port, "") == SERVING
        assert await health_of(server.port, SERVICE) == NOT_SERVING
        await server.health.set(SERVICE, True)
        assert await health_of(server.port, SERVICE) == SERVING
        await server.health.set(SERVICE, False)
        assert await health_of(server.port, SERVICE) == NOT_SERVING


async def test_the_health_of_an_unknown_name_is_not_found() -> None:
    async with serve_echo(EchoService()) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(server.port, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_draining_server_is_not_ready_and_goes_on_serving() -> None:
    async with (
        serve_echo(EchoService()) as server,
        dial(f"127.0.0.1:{server.port}") as (link, _),
    ):
        await server.health.set(SERVICE, True)
        await server.drain()
        assert await health_of(server.port, SERVICE) == NOT_SERVING
        assert await health_of(server.port, "") == NOT_SERVING
        await server.health.set(SERVICE, True)
        assert await health_of(server.port, SERVICE) == NOT_SERVING
        assert await ask(link, "still here").get() == b"still here"


async def test_a_stopped_server_ends_its_links_and_their_entries() -> None:
    service = EchoService()
    async with (
        serve_echo(service) as server,
        dial(f"127.0.0.1:{server.port}") as (link, listener),
    ):
        held = ask(link, "hold")
        await ask(link, "seen").get()
        await server.stop()
        assert isinstance(await held.error(), LinkLost)
        await asyncio.wait_for(listener.down.wait(), 5)
        handler = service.handlers[0]
        await asyncio.wait_for(handler.closed.wait(), 5)
        assert isinstance(handler.cancelled[1], LinkLost)
        await server.stop()


async def test_reflection_names_every_service() -> None:
    async with (
        serve_echo(EchoService()) as server,
        open_channel(f"127.0.0.1:{server.port}") as channel,
    ):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(timeout=5)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {item.name for item in answer.list_services_response.service}
        call.cancel()
    assert names == {
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }


async def test_a_port_in_use_is_refused_not_shared() -> None:
    async with serve_echo(EchoService()) as server:
        second = Server(f"127.0.0.1:{server.port}", [])
        with pytest.raises(OSError, match="cannot listen on"):
            await second.start()
        await second.stop()


async def test_links_to_one_address_have_connections_of_their_own() -> None:
    async with (
        serve_echo(EchoService()) as server,
        proxy_to(server.port) as proxy,
        dial(f"127.0.0.1:{proxy.port}"),
        dial(f"127.0.0.1:{proxy.port}"),
    ):
        assert proxy.accepted == 2
