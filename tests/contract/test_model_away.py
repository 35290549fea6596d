"""The only group of a model goes and comes back while a stream runs, other models stay."""

import asyncio
from pathlib import Path

import pytest

from radixmesh.errors import ModelNotServed, NoReplicaReady
from radixmesh.models import tokenizer_fingerprint
from radixmesh.router.v1 import fleet_service_pb2 as pb
from tests.fakes.oracle import ordinary_ids
from tests.fakes.router_mesh import Got, RouterMesh, eventually, run_mesh
from tests.fakes.worker import FakeWorker

PROMPT, COUNT = "Once upon a time.", 40


def other(model_dir: Path) -> FakeWorker:
    """A group of another model, so that the fleet is never empty."""
    return FakeWorker(
        model="other",
        fingerprint=tokenizer_fingerprint(model_dir),
        ordinary=ordinary_ids(model_dir),
    )


async def begun(mesh: RouterMesh) -> "asyncio.Task[Got]":
    """A stream that has some ids."""
    some = asyncio.Event()
    stream = asyncio.create_task(
        mesh.generate(PROMPT, COUNT, model="tiny", watch=lambda got: some.set())
    )
    async with asyncio.timeout(5):
        await some.wait()
    await mesh.fleet.RemoveGroup(pb.RemoveGroupRequest(group_id="g0"))
    await eventually(lambda: not mesh.running)
    return stream


async def test_a_stream_waits_for_its_model_to_come_back(model_dir: Path) -> None:
    async with (
        other(model_dir) as another,
        run_mesh(
            model_dir, workers=1, extra_groups=(another.address,), shape={"step_s": 0.02}
        ) as mesh,
    ):
        address = f"127.0.0.1:{mesh.worker_proxies[0].port}"
        stream = await begun(mesh)
        with pytest.raises(ModelNotServed):
            await mesh.generate(PROMPT, COUNT, model="tiny")
        assert not stream.done()
        await mesh.fleet.AddGroup(pb.AddGroupRequest(address=address, group_id="g0"))
        got = await stream
        assert got.ids[0] == mesh.text.output_ids(PROMPT, COUNT)
        await mesh.until_nothing_is_held()


async def test_a_model_that_stays_away_is_said_to_be_unavailable(model_dir: Path) -> None:
    async with (
        other(model_dir) as another,
        run_mesh(
            model_dir,
            workers=1,
            extra_groups=(another.address,),
            shape={"step_s": 0.02},
            resume_wait_s=0.3,
        ) as mesh,
    ):
        stream = await begun(mesh)
        with pytest.raises(NoReplicaReady):
            await stream
        await mesh.until_nothing_is_held()
