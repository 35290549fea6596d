"""A connection that says nothing for long is kept, however often its client pings."""

import asyncio

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixmesh.rpc.server import Server


async def test_a_silent_stream_is_not_sent_away_for_its_pings() -> None:
    server = Server("127.0.0.1:0", [])
    port = await server.start()
    options = (("grpc.keepalive_time_ms", 1_100), ("grpc.http2.max_pings_without_data", 0))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert await watching.read()
            # A server that minds sends the client away at its third or fourth ping.
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(6):
                    await watching.read()
            watching.cancel()
    finally:
        await server.stop()
