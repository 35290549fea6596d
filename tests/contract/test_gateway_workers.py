"""/workers and what goes with it, on a whole router: who may call, and what it does."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from radixmesh.errors import NotSupported
from radixmesh.models import tokenizer_fingerprint
from radixmesh.settings import load
from radixmesh.worker.v1 import worker_service_pb2
from router.edge.http import build_http
from router.edge.workers import WorkersAccess, add_workers, address_of, read_worker
from router.settings import RouterSettings
from tests.fakes.group_link import FakeFleet
from tests.fakes.oracle import ordinary_ids
from tests.fakes.router_mesh import LOOPBACK, RouterMesh, eventually, run_mesh
from tests.fakes.worker import FakeWorker


class Flushing(FakeWorker):
    """A group whose cache can be emptied."""

    flushed = 0

    async def FlushCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.flushed += 1
        return worker_service_pb2.FlushCacheResponse(removed_block_count=1)


@asynccontextmanager
async def calling(
    model_dir: Path, *, workers: int = 1, **flags: Any
) -> AsyncGenerator[tuple[RouterMesh, httpx.AsyncClient]]:
    async with run_mesh(model_dir, workers=workers, **{"workers_api": True, **flags}) as mesh:
        url = f"http://{LOOPBACK}:{mesh.ports.http}"
        async with httpx.AsyncClient(base_url=url) as http:
            yield mesh, http


def another(model_dir: Path) -> Flushing:
    return Flushing(
        fingerprint=tokenizer_fingerprint(model_dir), ordinary=ordinary_ids(model_dir), step_s=0.01
    )


async def until(http: httpx.AsyncClient, total: int, healthy: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(8):
        while True:
            said = (await http.get("/workers")).json()
            good = [one for one in said["workers"] if one["is_healthy"]]
            if said["total"] == total and len(good) == healthy:
                return list(said["workers"])
            await asyncio.sleep(0.02)


async def test_workers_are_listed_added_and_taken_out(model_dir: Path) -> None:
    async with calling(model_dir) as (mesh, http), another(model_dir) as second:
        [first] = await until(http, 1, 1)
        assert (first["id"], first["model_id"], first["worker_type"]) == ("g0", "tiny", "regular")
        url = f"grpc://{second.address}"
        added = await http.post("/workers", json={"url": url})
        assert added.status_code == 202
        assert added.json()["worker_id"] == second.address
        assert added.json()["url"] == url
        assert (await http.get(added.headers["location"])).json()["url"] == url
        await until(http, 2, 2)
        again = await http.post("/workers", json={"url": url})
        assert again.status_code == 409
        assert again.json()["error"]["code"] == "group_exists"
        gone = await http.delete("/workers/g0")
        assert (gone.status_code, gone.json()["status"]) == (202, "accepted")
        [left] = await until(http, 1, 1)
        assert left["url"] == url
        assert (await mesh.generate("hello", 4)).text == mesh.text.output("hello", 4)
        assert second.submits


async def test_a_worker_that_is_taken_out_finishes_its_streams(model_dir: Path) -> None:
    async with calling(model_dir, workers=2, shape={"step_s": 0.01}) as (mesh, http):
        streams = [asyncio.create_task(mesh.generate(f"story {n}", 60)) for n in range(8)]
        await eventually(lambda: all(worker.running for worker in mesh.workers))
        await http.delete("/workers/g0")
        leaving = (await http.get("/workers/g0")).json()
        assert (leaving["is_healthy"], leaving["reason"]) == (False, "draining")
        got = await asyncio.gather(*streams)
        assert [each.text for each in got] == [mesh.text.output(f"story {n}", 60) for n in range(8)]
        assert mesh.workers[0].cancelled == {}
        await until(http, 1, 1)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_worker_that_is_not_there_is_not_found(model_dir: Path, method: str) -> None:
    async with calling(model_dir) as (_, http):
        answer = await http.request(method, "/workers/nobody/at:1")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "group_not_found"


async def test_loads_are_told_for_each_replica(model_dir: Path) -> None:
    nowhere = f"away={LOOPBACK}:1"
    async with calling(model_dir, extra_groups=(nowhere,)) as (_, http):
        there, away = (await http.get("/get_loads")).json()["workers"]
    assert there["details"]["dp_rank_count"] == 1
    assert there["details"]["loads"][0]["max_total_num_tokens"] == 4096 * 4
    assert there["load"] == 0
    assert (away["load"], away["details"]["loads"]) == (-1, [])


async def test_caches_are_flushed_and_those_that_can_not_be_are_told(model_dir: Path) -> None:
    async with calling(model_dir) as (mesh, http), another(model_dir) as second:
        refused = await http.post("/flush_cache")
        assert refused.status_code == 206
        assert (
            refused.json()["failed"][0]["error"]
            == NotSupported("the fake speaks on links only").message
        )
        await http.post("/workers", json={"url": second.address})
        await http.delete("/workers/g0")
        await until(http, 1, 1)
        flushed = (await http.post("/flush_cache")).json()
    assert (flushed["status"], flushed["workers_flushed"], second.flushed) == ("success", 1, 1)
    assert mesh.workers[0].running == 0


CALLS = [
    ("GET", "/workers"),
    ("POST", "/workers"),
    ("GET", "/workers/g0"),
    ("DELETE", "/workers/g0"),
    ("GET", "/get_loads"),
    ("POST", "/flush_cache"),
]


@asynccontextmanager
async def alone(**access: Any) -> AsyncGenerator[httpx.AsyncClient]:
    """The HTTP edge on a fleet of one group, without a router around it."""

    async def flush(address: str) -> int:
        return 0

    pipeline: Any = None  # nobody generates
    app = build_http(pipeline, ready=lambda: True, registry=CollectorRegistry())
    add_workers(app, FakeFleet("g0").fleet, WorkersAccess(**access), flush)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield http


async def statuses(http: httpx.AsyncClient, **headers: str) -> set[int]:
    return {
        (await http.request(method, path, headers=headers)).status_code for method, path in CALLS
    }


async def test_nobody_may_unless_it_is_switched_on() -> None:
    async with alone(on=False, api_key="k") as http:
        assert await statuses(http, authorization="Bearer k") == {501}
        said = (await http.get("/workers")).json()["error"]["message"]
        assert "--workers-api" in said


async def test_the_key_opens_it_and_nothing_else_does() -> None:
    async with alone(on=True, api_key="k") as http:
        assert await statuses(http) == {401}
        assert await statuses(http, authorization="Bearer wrong") == {401}
        right = {"authorization": "Bearer k"}
        assert (await http.get("/workers", headers=right)).json()["total"] == 1


async def test_without_a_key_web_pages_may_not() -> None:
    async with alone(on=True) as http:
        assert await statuses(http, origin="https://elsewhere.example") == {401}
        assert (await http.get("/workers")).json()["total"] == 1


def test_an_open_switchboard_is_for_loopback_only(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("--host=127.0.0.1", "--host=::1", "--host=localhost"):
        load(RouterSettings, ["--workers-api", host], prog="radixmesh-router")
    load(RouterSettings, ["--workers-api", "--host=0.0.0.0", "--api-key=k"], prog="")
    with pytest.raises(SystemExit):
        load(RouterSettings, ["--workers-api", "--host=0.0.0.0"], prog="radixmesh-router")
    assert capsys.readouterr().err == (
        "radixmesh-router: --workers-api on 0.0.0.0 needs --api-key\n"
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'{"url": 5}', 400),
        (b'{"url": "http://h:1"}', 400),
        (b'{"url": "h"}', 400),
        (b'{"url": "h:1/path"}', 400),
        (b'{"url": "grpc://\\ud800:1"}', 400),
        (b'{"url": "grpc://unix:/run/x:1"}', 400),
        (b'{"url": "grpc://a\\nb:1"}', 400),
        (b'{"url": "grpc://a b:1"}', 400),
        (b'{"url": "grpc://h:\\u0663"}', 400),
        (b"[" * 60_000, 400),
        (b'{"url": "h:1", "worker_type": "prefill"}', 400),
        (b" " * 70_000, 413),
    ],
)
async def test_what_is_no_worker_is_refused(body: bytes, status: int) -> None:
    async with alone(on=True) as http:
        answer = await http.post("/workers", content=body)
        assert answer.status_code == status
        assert (await http.get("/workers")).json()["total"] == 1


def test_a_worker_may_be_named_with_and_without_the_scheme() -> None:
    assert address_of("grpc://h:1/") == address_of("h:1") == "h:1"
    assert read_worker(b'{"url": "grpc://[::1]:5", "priority": 3}') == "[::1]:5"
