"""Load as clients bring it: by every transport it counts from the dispatch on, and is shared."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixmesh.router.v1 import fleet_service_pb2 as pb
from tests.fakes.router_mesh import LOOPBACK, Got, RouterMesh, eventually, run_mesh

COUNT = 40
TOKENS = 50
Http = httpx.AsyncClient
Send = Callable[[RouterMesh, Http, str], Any]


async def over_grpc(mesh: RouterMesh, http: Http, prompt: str) -> list[str]:
    return [(await mesh.generate(prompt, TOKENS)).text]


async def with_choices(mesh: RouterMesh, http: Http, prompt: str) -> list[str]:
    got: Got = await mesh.generate(prompt, TOKENS, choice_count=2)
    return list(got.texts.values())


async def over_http(mesh: RouterMesh, http: Http, prompt: str) -> list[str]:
    answer = await http.post("/v1/completions", json=body(prompt))
    return [choice["text"] for choice in answer.json()["choices"]]


async def as_events(mesh: RouterMesh, http: Http, prompt: str) -> list[str]:
    async with http.stream("POST", "/v1/completions", json=body(prompt, stream=True)) as answer:
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return []


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, **fields}


@asynccontextmanager
async def client_of(mesh: RouterMesh) -> AsyncGenerator[Http]:
    limits = httpx.Limits(max_connections=None)
    base = f"http://{LOOPBACK}:{mesh.ports.http}"
    async with httpx.AsyncClient(base_url=base, limits=limits, timeout=15) as http:
        yield http


async def booked(mesh: RouterMesh) -> list[int]:
    """Requests that the router has at each group."""
    listed = await mesh.fleet.ListReplicas(pb.ListReplicasRequest())
    return [replica.in_flight_count for replica in listed.replicas]


async def until_booked(mesh: RouterMesh, total: int) -> list[int]:
    """Return the requests at each group once these are all."""
    counts: list[int] = []
    try:
        async with asyncio.timeout(8):
            while sum(counts) != total:
                counts = await booked(mesh)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{counts}, not {total} in all") from None
    return counts


@pytest.mark.parametrize(
    ("policy", "reports"), [("price", True), ("price", False), ("cache_aware", True)]
)
@pytest.mark.parametrize("send", [over_grpc, with_choices, over_http, as_events])
async def test_what_no_replica_has_answered_counts_and_is_shared(
    model_dir: Path, send: Send, policy: str, *, reports: bool
) -> None:
    """The gauge rises on dispatch, before a first byte; with and without reports of load."""
    async with run_mesh(model_dir, policy=policy) as mesh, client_of(mesh) as http:
        for worker in mesh.workers:
            worker.paused = True
            worker.silent_load = not reports
        outputs = COUNT * (2 if send is with_choices else 1)
        prompts = [f"{number} is a number, as is {number * 7}" for number in range(COUNT)]
        tasks = [asyncio.create_task(send(mesh, http, prompt)) for prompt in prompts]
        counts = await until_booked(mesh, outputs)
        assert max(counts) <= 1.3 * min(counts), counts
        await eventually(lambda: mesh.running == outputs)
        assert sorted(counts) == sorted(worker.running for worker in mesh.workers)
        for worker in mesh.workers:
            worker.paused = False
            worker._work.set()
        for prompt, texts in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert set(texts) <= {mesh.text.output(prompt, TOKENS)}
        await mesh.until_nothing_is_held()


async def test_the_next_request_sees_the_load_of_one_that_only_prefills(model_dir: Path) -> None:
    """Slow prefill and one id: nothing is answered before all were placed."""
    async with run_mesh(model_dir, workers=4) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        tasks = [
            asyncio.create_task(mesh.generate(f"{number}{number} is a number", 1))
            for number in range(32)
        ]
        counts = await until_booked(mesh, 32)
        assert max(counts) - min(counts) <= 2
        for worker in mesh.workers:
            worker.paused = False
            worker._work.set()
        await asyncio.gather(*tasks)
        await mesh.until_nothing_is_held()
