"""A router's fleet on a real worker group that is scaled under it; ranks are real processes."""

from pathlib import Path
from random import Random
from typing import Any

import grpc.aio
import pytest

from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.fleet import Output, ask, count_ready, running_fleet, spec, until
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.worker_front import run_front

pytestmark = [pytest.mark.e2e]


async def test_requests_use_replicas_while_they_are_there_and_none_is_lost_when_they_go(
    model_dir: Path,
) -> None:
    rng = Random(3)
    flags: dict[str, Any] = {"model_name": "tiny", "drain_grace_s": 10, "fake_decode_ms": 5}
    async with (
        run_front(model_dir, **flags) as address,
        running_fleet(address, ready=1) as fleet,
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub = WorkerServiceStub(channel)
        await stub.ScaleReplicas(pb.ScaleReplicasRequest(dp=3))
        await until(fleet, lambda: count_ready(fleet) == 3)
        asked = [[rng.randrange(4, 1000) for _ in range(40)] for _ in range(24)]
        outputs = [Output() for _ in asked]
        used = set()
        for prompt, output in zip(asked, outputs, strict=True):
            booking = fleet.place(ask(prompt))
            used.add(booking.dp_rank)
            fleet.submit(booking, spec(prompt, max_tokens=100), output)
        assert used == {0, 1, 2}
        for output in outputs:
            await output.until(lambda each: each.accepted > 0)
        await stub.ScaleReplicas(pb.ScaleReplicasRequest(dp=1))
        await until(fleet, lambda: count_ready(fleet) == 1)
        bookings = [fleet.place(ask(prompt)) for prompt in asked[:6]]
        assert {booking.dp_rank for booking in bookings} == {0}
        for booking in bookings:
            booking.release()
        for output in outputs:
            await output.ended()
        ordinary = ordinary_ids(model_dir)
        for prompt, output in zip(asked, outputs, strict=True):
            assert output.error is None
            assert output.ids == oracle_output(prompt, ordinary, 100)
        await until(fleet, lambda: len(fleet.replicas()) == 1)
        [view] = fleet.replicas()
        assert (view.dp_rank, view.topology) == (0, "dp=1 pp=1 tp=1")
