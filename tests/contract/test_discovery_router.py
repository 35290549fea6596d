"""A whole router whose fleet is listed by Kubernetes, a file, or an administrator."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixmesh.errors import MeshError, ModelNotServed, NoReplicaReady
from radixmesh.models import tokenizer_fingerprint
from radixmesh.router.v1 import fleet_service_pb2 as pb
from router.discovery import file as file_source
from tests.fakes.kubernetes import FakeKubernetes, endpoint_slice, pod
from tests.fakes.oracle import ordinary_ids
from tests.fakes.router_mesh import LOOPBACK, Got, RouterMesh, eventually, run_mesh
from tests.fakes.tcp_proxy import proxy_to
from tests.fakes.worker import FakeWorker

READY = 2


@pytest.fixture(autouse=True)
def _quick_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_source, "INTERVAL_S", 0.03)


@asynccontextmanager
async def fake_workers(
    model_dir: Path, count: int, **shape: Any
) -> AsyncGenerator[list[FakeWorker]]:
    said = {"fingerprint": tokenizer_fingerprint(model_dir), "ordinary": ordinary_ids(model_dir)}
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(FakeWorker(**{"step_s": 0.002, **said, **shape}))
            for _ in range(count)
        ]


def listed(worker: FakeWorker, uid: str, **how: Any) -> dict[str, Any]:
    """The slice of one pod; every fake has a port of its own."""
    return endpoint_slice(f"w{worker.port}", [pod(uid, LOOPBACK, **how)], port=worker.port)


async def rows(mesh: RouterMesh) -> list[pb.Replica]:
    return list((await mesh.fleet.ListReplicas(pb.ListReplicasRequest())).replicas)


async def until(
    mesh: RouterMesh, wanted: Callable[[list[pb.Replica]], bool], timeout_s: float = 8.0
) -> list[pb.Replica]:
    """Return the rows of all replicas once they are as wanted."""
    async with asyncio.timeout(timeout_s):
        while not wanted(found := await rows(mesh)):  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.02)
    return found


def ready(*names: str) -> Callable[[list[pb.Replica]], bool]:
    """Whether these groups are the fleet, and all of them get requests."""
    return lambda found: (
        sorted(one.group_id for one in found) == sorted(names)
        and all(one.phase == READY for one in found)
    )


@asynccontextmanager
async def in_kubernetes(
    model_dir: Path, api: FakeKubernetes, **flags: Any
) -> AsyncGenerator[RouterMesh]:
    flags = {"groups_service": "workers", "kubernetes_api": api.url, **flags}
    async with run_mesh(model_dir, workers=0, **flags) as mesh:
        yield mesh


async def ask_for(mesh: RouterMesh, count: int, tokens: int) -> list["asyncio.Task[Got]"]:
    return [asyncio.create_task(mesh.generate(f"{n}{n} is a number", tokens)) for n in range(count)]


async def whole(mesh: RouterMesh, streams: list["asyncio.Task[Got]"], tokens: int) -> bool:
    got = await asyncio.gather(*streams)
    return [each.text for each in got] == [
        mesh.text.output(f"{n}{n} is a number", tokens) for n in range(len(streams))
    ]


async def test_pods_that_are_not_ready_are_judged_by_their_links(model_dir: Path) -> None:
    async with FakeKubernetes() as api, fake_workers(model_dir, 1) as [worker]:
        await api.put(listed(worker, "u1", ready=False, name="worker-0"))
        await api.put(endpoint_slice("nobody", [pod("u2", LOOPBACK, name="worker-1")], port=1))
        async with in_kubernetes(model_dir, api) as mesh:
            [row] = await until(mesh, ready("worker-0"))
            assert row.reason == ""
            assert (await mesh.generate("hello", 4)).text == mesh.text.output("hello", 4)


async def test_a_rolling_update_breaks_no_stream(model_dir: Path) -> None:
    async with FakeKubernetes() as api, fake_workers(model_dir, 3, step_s=0.02) as workers:
        old, other, new = workers
        await api.put(listed(old, "u1", name="a"))
        await api.put(listed(other, "u2", name="b"))
        async with in_kubernetes(model_dir, api) as mesh:
            await until(mesh, ready("a", "b"))
            streams = await ask_for(mesh, 8, 60)
            await eventually(lambda: old.running >= 1 and old.running + other.running == 8)
            had = len(old.submits)
            await api.put(listed(old, "u1", name="a", ready=True, terminating=True))
            found = await until(mesh, lambda found: any(one.reason for one in found))
            assert [one.reason for one in found] == ["draining", ""]
            await api.put(listed(new, "u3", name="c"))
            await until(mesh, lambda found: len(found) == 3)
            for n in range(6):
                await mesh.generate(f"more {n}", 2)
            assert await whole(mesh, streams, 60)
            assert len(old.submits) == had
            assert old.cancelled == {}
            await api.delete(f"w{old.port}")
            await until(mesh, ready("b", "c"))


async def test_an_address_of_another_pod_is_another_group_though_the_watch_lost_it(
    model_dir: Path,
) -> None:
    async with FakeKubernetes() as api, fake_workers(model_dir, 2) as [first, second]:
        await api.put(listed(first, "u1", name="a"))
        async with in_kubernetes(model_dir, api, kubernetes_resync_s=0.5) as mesh:
            await until(mesh, ready("a"))
            await eventually(lambda: api.watchers == 1)
            api.mute = True
            # The pod goes, another model's takes its address; nobody tells.
            await first.kill()
            taken = FakeWorker(port=first.port, model="other")
            async with taken:
                await api.put(listed(taken, "u9", name="x"))
                await api.put(listed(second, "u2", name="b"))
                found = await until(mesh, ready("b", "x"))
                assert {one.group_id: one.model for one in found} == {"b": "tiny", "x": "other"}
                await mesh.generate("hello", 4, model="tiny")
                assert taken.submits == []


@pytest.mark.parametrize(
    ("pods", "away_s"),
    [
        (8, 1.0),
        pytest.param(200, 15.0, marks=[pytest.mark.long, pytest.mark.timeout(240)]),
    ],
)
async def test_an_api_that_is_away_costs_nothing(model_dir: Path, pods: int, away_s: float) -> None:
    async with FakeKubernetes() as api, fake_workers(model_dir, pods) as workers:
        for number, worker in enumerate(workers):
            await api.put(listed(worker, f"u{number}", name=f"w{number}"))
        names = [f"w{number}" for number in range(pods)]
        async with in_kubernetes(model_dir, api, kubernetes_resync_s=0.2) as mesh:
            await until(mesh, ready(*names), timeout_s=60)
            await api.leave()
            asked = 0
            async with asyncio.timeout(away_s + 30):
                began = asyncio.get_running_loop().time()
                while asyncio.get_running_loop().time() < began + away_s:
                    got = await mesh.generate(f"while away {asked}", 4)
                    assert got.text == mesh.text.output(f"while away {asked}", 4)
                    asked += 1
            assert ready(*names)(await rows(mesh))
            await api.come_back()
            await api.delete(f"w{workers[0].port}")
            await until(mesh, ready(*names[1:]), timeout_s=30)


async def test_a_router_waits_for_the_first_list_and_for_those_on_it(model_dir: Path) -> None:
    async with FakeKubernetes() as api, fake_workers(model_dir, 1) as [worker]:
        worker.silent_feed = True
        await api.put(listed(worker, "u1", name="a"))
        await api.leave()
        async with in_kubernetes(model_dir, api) as mesh, http_of(mesh) as http:
            for _ in range(5):
                assert (await http.get("/readiness")).status_code == 503
                await asyncio.sleep(0.05)
            await api.come_back()
            await until(mesh, lambda found: bool(found))
            assert (await http.get("/readiness")).status_code == 503
            worker.silent_feed = False
            await worker.restart()
            await until(mesh, ready("a"))
            assert (await http.get("/readiness")).status_code == 200


async def test_a_router_that_was_ready_stays_so_when_all_have_gone_and_says_503(
    model_dir: Path,
) -> None:
    async with FakeKubernetes() as api, fake_workers(model_dir, 1) as [worker]:
        await api.put(listed(worker, "u1", name="a"))
        async with in_kubernetes(model_dir, api, ready_wait_s=0) as mesh, http_of(mesh) as http:
            await until(mesh, ready("a"))
            await api.delete(f"w{worker.port}")
            await until(mesh, lambda found: not found)
            assert (await http.get("/readiness")).status_code == 200
            with pytest.raises(NoReplicaReady) as nobody:
                await mesh.generate("hello", 4)
            assert nobody.value.retry_after_s
            body = {"model": "tiny", "prompt": "hello"}
            answer = await http.post("/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@asynccontextmanager
async def http_of(mesh: RouterMesh) -> AsyncGenerator[httpx.AsyncClient]:
    url = f"http://{LOOPBACK}:{mesh.ports.http}"
    async with httpx.AsyncClient(base_url=url) as http:
        yield http


async def test_groups_come_from_a_file_and_one_added_by_hand_stays(
    model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "members.yaml"
    async with fake_workers(model_dir, 3) as [one, two, by_hand]:
        file.write_text(json.dumps([f"one={one.address}"]))
        async with run_mesh(model_dir, workers=0, members_file=file) as mesh:
            await until(mesh, ready("one"))
            await mesh.fleet.AddGroup(
                pb.AddGroupRequest(address=by_hand.address, group_id="by-hand")
            )
            both = [f"one={one.address}", {"address": two.address, "name": "two"}]
            file.write_text(json.dumps(both))
            await until(mesh, ready("by-hand", "one", "two"))
            await mesh.fleet.RemoveGroup(pb.RemoveGroupRequest(group_id="two"))
            file.write_text(json.dumps([two.address, by_hand.address]))
            await until(mesh, ready("by-hand"))  # what was taken out by hand stays out
            file.write_text(json.dumps([by_hand.address]))
            await asyncio.sleep(0.2)  # some readings
            file.write_text(json.dumps([two.address]))
            await until(mesh, ready("by-hand", two.address))


async def test_text_services_come_from_a_file_and_go_without_a_loss(
    model_dir: Path, tmp_path: Path
) -> None:
    file = tmp_path / "members.yaml"
    async with run_mesh(model_dir, workers=1, tokenizers=2, detokenizers=2) as whole_mesh:
        first, second = whole_mesh.detokenizers
        tokenizers = [f"{LOOPBACK}:{proxy.port}" for proxy in whole_mesh.tokenizers]

        def write(*detokenizers: int) -> None:
            file.write_text(
                json.dumps(
                    {
                        "groups": [whole_mesh.workers[0].address],
                        "tokenizers": tokenizers[:1],
                        "detokenizers": [f"{LOOPBACK}:{port}" for port in detokenizers],
                    }
                )
            )

        whole_mesh.workers[0].paused = True
        write(first.port)
        async with run_mesh(
            model_dir, workers=0, tokenizers=0, detokenizers=0, members_file=file
        ) as mesh:
            await until(mesh, lambda found: bool(found) and found[0].phase == READY)
            stream = asyncio.create_task(mesh.generate("a story", 30))
            await eventually(lambda: whole_mesh.workers[0].running == 1)
            write(second.port)
            await until_links(mesh, "detokenizer", 2)  # the first one has a stream still
            await mesh.fleet.ListReplicas(pb.ListReplicasRequest())
            whole_mesh.workers[0].paused = False
            assert (await stream).text == mesh.text.output("a story", 30)
            await until_links(mesh, "detokenizer", 1)
            assert (await mesh.generate("another", 5)).text == mesh.text.output("another", 5)


async def until_links(mesh: RouterMesh, service: str, count: int) -> None:
    name = f'radixmesh_router_links_up_count{{service="{service}"}} {count}.0'
    async with http_of(mesh) as http, asyncio.timeout(8):
        while name not in (await http.get("/metrics")).text:  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.02)


async def test_scaling_in_breaks_no_long_stream(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=3, shape={"step_s": 0.01}) as mesh:
        streams = await ask_for(mesh, 12, 120)
        await eventually(lambda: mesh.running == len(streams))
        assert all(worker.running for worker in mesh.workers)
        request = pb.DrainGroupRequest(group_id="g1", remove_when_idle=True)
        request.deadline.FromMilliseconds(300)
        assert (await mesh.fleet.DrainGroup(request)).in_flight_count >= 1
        had = len(mesh.workers[1].submits)
        await until(mesh, lambda found: "g1" not in {one.group_id for one in found})
        assert await whole(mesh, streams, 120)
        # What outlasted the deadline was taken away there and went on elsewhere.
        assert len(mesh.workers[1].submits) == had
        assert mesh.workers[1].cancelled
        assert any(submit.output_ids for worker in mesh.workers for submit in worker.submits)
        await mesh.until_nothing_is_held()


async def test_a_drained_group_finishes_its_streams_and_comes_back_when_it_is_added_again(
    model_dir: Path,
) -> None:
    async with run_mesh(model_dir, workers=2, shape={"step_s": 0.01}) as mesh:
        streams = await ask_for(mesh, 8, 50)
        await eventually(lambda: mesh.running == len(streams))
        assert all(worker.running for worker in mesh.workers)
        await mesh.fleet.DrainGroup(pb.DrainGroupRequest(group_id="g1"))
        assert await whole(mesh, streams, 50)
        assert mesh.workers[1].cancelled == {}
        had = len(mesh.workers[1].submits)
        for n in range(4):
            await mesh.generate(f"more {n}", 2)
        assert len(mesh.workers[1].submits) == had
        address = f"{LOOPBACK}:{mesh.worker_proxies[1].port}"
        await mesh.fleet.AddGroup(pb.AddGroupRequest(address=address, group_id="g1"))
        await until(mesh, ready("g0", "g1"))
        for n in range(16):
            await mesh.generate(f"again {n}", 2)
        assert len(mesh.workers[1].submits) > had


async def test_one_process_at_two_addresses_is_one_group_for_routing(model_dir: Path) -> None:
    async with fake_workers(model_dir, 1) as [worker], proxy_to(worker.port) as proxy:
        groups = [f"a={worker.address}", f"b={LOOPBACK}:{proxy.port}"]
        async with run_mesh(model_dir, workers=0, extra_groups=tuple(groups)) as mesh:
            found = await until(
                mesh,
                lambda found: len(found) == 2 and sum(one.phase == READY for one in found) == 1,
            )
            [kept] = [one for one in found if one.phase == READY]
            [other] = [one for one in found if one.phase != READY]
            assert other.reason == f"the same process as group {kept.group_id}"
            for n in range(8):
                assert (await mesh.generate(f"say {n}", 3)).text == mesh.text.output(f"say {n}", 3)
            counts = {one.group_id: one.routed_count for one in await rows(mesh)}
            assert counts == {kept.group_id: 8, other.group_id: 0}
            await mesh.fleet.RemoveGroup(pb.RemoveGroupRequest(group_id=kept.group_id))
            await until(mesh, ready(other.group_id))
            await mesh.generate("still here", 3)


async def test_an_unknown_model_and_one_that_is_away_differ(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=2, ready_wait_s=0) as mesh, http_of(mesh) as http:
        await until(mesh, ready("g0", "g1"))

        async def said(model: str) -> tuple[int, str, str | None]:
            body = {"model": model, "prompt": "hello", "max_tokens": 2}
            answer = await http.post("/v1/completions", json=body)
            code = answer.json().get("error", {}).get("code", "")
            return answer.status_code, code, answer.headers.get("retry-after")

        assert await said("nobody") == (404, "model_not_found", None)
        with pytest.raises(ModelNotServed):
            await mesh.generate("hello", 2, model="nobody")
        for worker in mesh.workers:
            await worker.kill()
        await until(mesh, lambda found: all(one.phase != READY for one in found))
        assert await said("tiny") == (503, "no_replica_ready", "1")
        assert await said("nobody") == (404, "model_not_found", None)
        with pytest.raises(MeshError) as away:
            await mesh.generate("hello", 2)
        assert (away.value.reason, bool(away.value.retry_after_s)) == ("NO_REPLICA_READY", True)
