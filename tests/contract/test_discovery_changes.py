"""Pods that stop being meant, and the last old one that goes before the new one is known."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from radixmesh.models import tokenizer_fingerprint
from radixmesh.router.v1 import fleet_service_pb2 as pb
from tests.fakes.kubernetes import FakeKubernetes, endpoint_slice, pod
from tests.fakes.oracle import ordinary_ids
from tests.fakes.router_mesh import LOOPBACK, RouterMesh, eventually, run_mesh
from tests.fakes.worker import FakeWorker

PROMPT = "Once upon a time there was a fleet that changed."


def shape(model_dir: Path) -> dict[str, Any]:
    return {
        "fingerprint": tokenizer_fingerprint(model_dir),
        "ordinary": ordinary_ids(model_dir),
        "step_s": 0.002,
    }


def of_pods(worker: FakeWorker, *uids: str, **labels: str) -> dict[str, Any]:
    """The slice of a worker; without uids it lists nobody any more."""
    pods = [pod(uid, LOOPBACK, name=uid) for uid in uids]
    return endpoint_slice(f"w{worker.port}", pods, port=worker.port, **labels)


@asynccontextmanager
async def selecting(
    model_dir: Path, api: FakeKubernetes, **flags: Any
) -> AsyncGenerator[RouterMesh]:
    where = {"groups_selector": "app=worker", "kubernetes_api": api.url}
    async with run_mesh(model_dir, workers=0, **{**where, **flags}) as mesh:
        yield mesh


async def groups(mesh: RouterMesh) -> set[str]:
    """Those that get requests."""
    listed = await mesh.fleet.ListReplicas(pb.ListReplicasRequest())
    return {one.group_id for one in listed.replicas if one.phase == pb.REPLICA_PHASE_READY}


async def until_groups(mesh: RouterMesh, *names: str) -> None:
    seen: set[str] = set()
    try:
        async with asyncio.timeout(8):
            while seen != set(names):
                seen = await groups(mesh)
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"{seen}, not {names}") from None


async def test_pods_that_the_selector_means_no_more_leave_though_the_watch_said_nothing(
    model_dir: Path,
) -> None:
    said = shape(model_dir)
    async with FakeKubernetes() as api, FakeWorker(**said) as one, FakeWorker(**said) as two:
        await api.put(of_pods(one, "a", app="worker"))
        await api.put(of_pods(two, "b", app="worker"))
        async with selecting(model_dir, api, kubernetes_resync_s=0.3) as mesh:
            await until_groups(mesh, "a", "b")
            await eventually(lambda: api.watchers == 1)
            api.mute = True
            await api.put(of_pods(one, "a", app="spare"))
            await until_groups(mesh, "b")
            had = len(one.submits)
            for number in range(6):
                await mesh.generate(f"{number} {PROMPT}", 2)
            assert len(one.submits) == had
            await api.put(of_pods(two, app="worker"))  # its slice stays, and lists nobody
            await until_groups(mesh)
            await api.put(of_pods(one, "a", app="worker"))
            await until_groups(mesh, "a")


async def test_no_request_fails_while_the_last_pod_is_replaced_by_one_not_known_yet(
    model_dir: Path,
) -> None:
    """Kubernetes takes the new one for ready before this router has its snapshot."""
    said = shape(model_dir)
    async with FakeKubernetes() as api, FakeWorker(**said) as old, FakeWorker(**said) as new:
        await api.put(of_pods(old, "old", app="worker"))
        new.silent_feed = True
        async with selecting(model_dir, api) as mesh:
            await until_groups(mesh, "old")
            served, stopped = 0, asyncio.Event()

            async def ask_on() -> None:
                nonlocal served
                while not stopped.is_set():
                    prompt = f"{served} {PROMPT}"
                    assert (await mesh.generate(prompt, 4)).text == mesh.text.output(prompt, 4)
                    served += 1

            asking = [asyncio.create_task(ask_on()) for _ in range(4)]
            await eventually(lambda: served >= 8)
            await api.put(of_pods(new, "new", app="worker"))
            await api.delete(f"w{old.port}")
            await old.kill()
            await until_groups(mesh)
            waiting_at = served
            assert not any(task.done() for task in asking), "they wait"
            new.silent_feed = False
            for handler in new._handlers:
                handler.snapshot(0)
            await eventually(lambda: served >= waiting_at + 8)
            stopped.set()
            await asyncio.gather(*asking)
            assert new.submits
            await mesh.until_nothing_is_held()
