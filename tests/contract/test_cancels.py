"""Cancels that name nobody, and cancels towards who does not listen."""

import asyncio
from pathlib import Path

import pytest

from radixmesh.common.v1.link_pb2 import LinkControl
from radixmesh.rpc.link import Lane
from radixmesh.worker.v1.worker_service_pb2 import AttachRequest
from tests.fakes.router_end import attach
from tests.fakes.router_mesh import eventually, run_mesh
from tests.fakes.scripted_ranks import Row, ScriptedLauncher
from tests.fakes.worker_front import run_front
from worker.request import LENGTH

PROMPT = "Once upon a time there was a client that could not wait."


async def test_numbers_that_name_no_request_cancel_none(model_dir: Path) -> None:
    """No number, beginnings and continuations of numbers in use, the largest, one twice."""
    launcher = ScriptedLauncher()
    async with run_front(model_dir, launch=launcher) as address, attach(address) as router:
        await router.until_up(0)
        ranks = await launcher.incarnation(0, 0)
        outputs = [router.submit([5 + number]) for number in range(12)]
        adds = await ranks.adds(12)
        chosen = outputs[0].entry_id
        others = [output.entry_id for output in outputs[1:]]
        strange = [0, 2**64 - 1, *(each * 10 for each in others), *(each << 32 for each in others)]
        strange = [each for each in strange if each not in {chosen, *others}]
        control = LinkControl(cancels=[*strange, chosen, chosen])
        router.link.send(AttachRequest(link=control), Lane.CONTROL)
        assert await ranks.cancelled(1) == [adds[0].request_id]
        router.link.close(chosen)
        ranks.step([Row(add.request_id, 0, [9], LENGTH) for add in adds[1:]])
        assert [await output.result() for output in outputs[1:]] == [[9]] * 11
        # And no cancel came after the first one.
        marker = router.submit([7])
        [add] = await ranks.adds(1)
        router.link.cancel(marker.entry_id)
        assert await ranks.cancelled(1) == [add.request_id]


@pytest.mark.parametrize("way", ["frozen", "deaf", "cut"])
async def test_who_cancels_at_a_worker_that_does_not_listen_is_free_at_once(
    model_dir: Path, way: str
) -> None:
    async with run_mesh(model_dir, workers=1) as mesh:
        [worker], [proxy] = mesh.workers, mesh.worker_proxies
        worker.paused = True
        worker.deaf = way == "deaf"
        clients = [asyncio.create_task(mesh.generate(f"{n} {PROMPT}")) for n in range(20)]
        await eventually(lambda: len(worker.submits) == 20)
        if way == "frozen":
            proxy.freeze()
        if way == "cut":
            proxy.freeze()
            proxy.cut()
        for client in clients:
            client.cancel()
        async with asyncio.timeout(1):
            held = await mesh.held()
            while held.keys() & {"in flight", "booked"}:
                held = await mesh.held()
        proxy.thaw()
        # The worker learns of it, by the cancels or by the end of the link.
        await eventually(lambda: worker.running == 0)
        worker.paused, worker.deaf = False, False
        assert (await mesh.generate(PROMPT, 4)).text == mesh.text.output(PROMPT, 4)
        await mesh.until_nothing_is_held()
