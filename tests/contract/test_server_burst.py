"""A burst of calls on a server that was busy: all are served, none is cancelled by gRPC itself."""

import asyncio
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from radixmesh.rpc.server import Server

# gRPC's own bounds are 1 000, from which it draws lots, and 3 000.
CALLS = 3_500


@pytest.mark.timeout(60)
async def test_a_server_that_was_busy_serves_everybody_who_came_meanwhile() -> None:
    server = Server("127.0.0.1:0", [])
    port = await server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            await asyncio.to_thread(grpc.channel_ready_future(channel).result)
            check: Any = health_pb2_grpc.HealthStub(channel).Check
            # The loop stands still until all of them are on their way.
            calls = [check.future(health_pb2.HealthCheckRequest()) for _ in range(CALLS)]
            codes = await asyncio.to_thread(lambda: Counter(call.code() for call in calls))
    finally:
        await server.stop()
    assert codes == {grpc.StatusCode.OK: CALLS}
