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


async def until_in_flight(mesh: RouterMesh, count: int) -> None:
    """Wait until so many requests are admitted."""
    admitted = 0.0
    async with asyncio.timeout(5):
        while admitted < count:
            admitted = (await mesh.metrics())["radixmesh_router_requests_in_flight_count"]
            await asyncio.sleep(0.02)


class Clients:
    """Clients that ask again and again, and none of them is ever refused."""

    def __init__(self, mesh: RouterMesh) -> None:
        self.served = 0
        self._mesh = mesh
        self._stopped = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, count: int) -> None:
        self._tasks += [asyncio.create_task(self._ask()) for _ in range(count)]

    async def _ask(self) -> None:
        while not self._stopped:
            prompt = f"{self.served} {PROMPT}"
            got = await self._mesh.generate(prompt, 4)
            assert got.text == self._mesh.text.output(prompt, 4)
            self.served += 1

    async def until_served(self, more: int) -> None:
        wanted = self.served + more
        await eventually(lambda: self.served >= wanted)

    async def stop(self) -> None:
        self._stopped = True
        await asyncio.gather(*self._tasks)


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
            clients = Clients(mesh)
            clients.start(4)
            await clients.until_served(8)
            await api.put(of_pods(new, "new", app="worker"))
            await api.delete(f"w{old.port}")
            await old.kill()
            await until_groups(mesh)
            # Those who ask already were interrupted. These begin when nobody is there.
            clients.start(4)
            await until_in_flight(mesh, 8)
            new.silent_feed = False
            for handler in new._handlers:
                handler.snapshot(0)
            await clients.until_served(16)
            await clients.stop()
            assert new.submits
            await mesh.until_nothing_is_held()
