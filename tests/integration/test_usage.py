"""What is counted is what was: requests, ids and load, whatever mix runs and however it ends."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixmesh.errors import BadSampling
from radixmesh.router.v1 import fleet_service_pb2 as pb
from tests.fakes.router_mesh import LOOPBACK, Got, RouterMesh, eventually, run_mesh

PROMPT = "Once upon a time there was a router that counted all it saw."
SLOW: dict[str, Any] = {"step_s": 0.005}


class Left(Exception):
    """The client has had enough."""


@asynccontextmanager
async def meshed(
    model_dir: Path, **flags: Any
) -> AsyncGenerator[tuple[RouterMesh, httpx.AsyncClient]]:
    async with (
        run_mesh(model_dir, **flags) as mesh,
        httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{mesh.ports.http}", timeout=15) as http,
    ):
        yield mesh, http


async def counted(mesh: RouterMesh, http: httpx.AsyncClient, name: str) -> Counter[str]:
    """A counter's values by all of its labels, joined."""
    text = (await http.get("/metrics")).text
    return Counter(
        {
            " ".join(value for _, value in sorted(sample.labels.items())): int(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"radixmesh_router_{name}" and sample.value
        }
    )


def completion(prompt: str, count: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": count, "ignore_eos": True, **fields}


class Clients:
    """Clients of every kind, and the sum of what they were told."""

    def __init__(self, mesh: RouterMesh, http: httpx.AsyncClient) -> None:
        self.told: Counter[str] = Counter()
        self._mesh = mesh
        self._http = http

    def _note(self, prompt: int, cached: int, completion: int) -> None:
        self.told += Counter(prompt=prompt, cached=cached, completion=completion)

    async def streamed(self, number: int, **fields: Any) -> None:
        got = await self._mesh.generate(f"{number} {PROMPT}", 20, **fields)
        usages = [finish.usage for finish in got.finishes.values()]
        completion = sum(usage.completion_tokens for usage in usages)
        assert completion == sum(len(ids) for ids in got.ids.values())
        self._note(usages[0].prompt_tokens, usages[0].cached_tokens, completion)

    async def whole(self, number: int, **fields: Any) -> None:
        body = completion(f"{number} {PROMPT}", 20, **fields)
        usage = (await self._http.post("/v1/completions", json=body)).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        self._note(usage["prompt_tokens"], cached, usage["completion_tokens"])

    async def leave(self, number: int) -> None:
        def watch(got: Got) -> None:
            if len(got.ids[0]) >= 5:
                self._note(0, 0, len(got.ids[0]))
                raise Left

        with pytest.raises(Left):
            await self._mesh.generate(f"{number} {PROMPT}", 2_000, watch=watch)

    async def mistake(self) -> None:
        with pytest.raises(BadSampling):
            await self._mesh.generate(PROMPT, sampling={"temperature": -1.0, "max_tokens": 4})


async def test_counters_are_the_sums_of_what_clients_were_told(model_dir: Path) -> None:
    async with meshed(model_dir, shape=SLOW) as (mesh, http):
        clients = Clients(mesh, http)
        stop = mesh.text.output(f"7 {PROMPT}", 20)[4:7]
        await asyncio.gather(
            *(clients.streamed(number) for number in range(4)),
            *(clients.streamed(number, choice_count=3) for number in (4, 5)),
            clients.streamed(7, stop=[stop]),
            *(clients.whole(number) for number in range(10, 14)),
            clients.whole(14, n=2),
            *(clients.leave(number) for number in range(20, 23)),
            clients.mistake(),
        )
        await mesh.until_nothing_is_held()
        assert await counted(mesh, http, "requests_total") == {
            "grpc finished": 7,
            "http finished": 5,
            "grpc cancelled": 3,
            "grpc BAD_SAMPLING": 1,
        }
        for name in ("prompt", "cached"):
            total = (await counted(mesh, http, f"{name}_tokens_total")).total()
            assert total == clients.told[name], name
        # Who left may have been sent a little more than it read.
        sent = (await counted(mesh, http, "completion_tokens_total")).total()
        assert 0 <= sent - clients.told["completion"] <= 3 * 20


async def test_a_stream_that_went_on_elsewhere_is_counted_and_billed_once(
    model_dir: Path,
) -> None:
    async with meshed(model_dir, workers=1, shape={**SLOW, "dp": 2}) as (mesh, http):
        [worker] = mesh.workers
        cuts = 0

        def watch(got: Got) -> None:
            nonlocal cuts
            if len(got.ids[0]) >= 20 * (cuts + 1) and cuts < 2:
                cuts += 1
                worker.restart_replica(worker.submits[-1].dp_rank)

        got = await mesh.generate(PROMPT, 60, watch=watch)
        usage = got.finishes[0].usage
        assert got.finishes[0].receipt.attempts == 3
        assert got.text == mesh.text.output(PROMPT, 60)
        assert usage.prompt_tokens == len(mesh.text.prompt_ids(PROMPT))
        assert usage.completion_tokens == 60
        assert await counted(mesh, http, "requests_total") == {"grpc finished": 1}
        for name, count in (("prompt_tokens", usage.prompt_tokens), ("completion_tokens", 60)):
            assert (await counted(mesh, http, f"{name}_total")).total() == count
        losses = await counted(mesh, http, "output_losses_total")
        assert losses == {"GROUP_LOST worker": 2}
        await mesh.until_nothing_is_held()


async def loads(mesh: RouterMesh) -> tuple[int, int]:
    """What is booked by the router, and what replicas are believed to run and have waiting."""
    listed = (await mesh.fleet.ListReplicas(pb.ListReplicasRequest())).replicas
    booked = sum(one.in_flight_count for one in listed)
    return booked, sum(one.running_count + one.waiting_count for one in listed)


async def test_load_is_the_true_one_while_streams_come_end_leave_and_fail(
    model_dir: Path,
) -> None:
    async with meshed(model_dir) as (mesh, http):
        for worker in mesh.workers:
            worker.paused = True
        bodies = [completion(f"{number} {PROMPT}", 4) for number in range(6)]
        calls = [asyncio.create_task(http.post("/v1/completions", json=body)) for body in bodies]
        streams = [asyncio.create_task(mesh.generate(f"{n} {PROMPT}", 4)) for n in range(6, 12)]
        await until_loads(mesh, 12)
        for left in (*calls[:2], *streams[:2]):
            left.cancel()
        await until_loads(mesh, 8)
        # One that fails goes elsewhere: as many as before.
        mesh.workers[0].restart_replica(0)
        await until_loads(mesh, 8)
        for worker in mesh.workers:
            worker.paused = False
            worker._work.set()
        answers = await asyncio.gather(*calls[2:], *streams[2:])
        assert len(answers) == 8
        await until_loads(mesh, 0)
        await mesh.until_nothing_is_held()


async def until_loads(mesh: RouterMesh, count: int) -> None:
    """Wait until this many run, are booked, and are believed to run."""
    seen: object = None
    try:
        async with asyncio.timeout(5):
            await eventually(lambda: mesh.running == count)
            while seen != (count, count):
                seen = await loads(mesh)
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{seen}, {mesh.running} at workers; not {count}") from None


async def test_of_what_is_not_limited_nothing_is_remembered(model_dir: Path) -> None:
    async with meshed(model_dir) as (mesh, _):
        for number in range(30):
            own = f"{number} of many"
            await mesh.generate(PROMPT, 2, tenant=own, session=own, cache_salt=own)
        assert (await mesh.metrics())["radixmesh_router_tenants_count"] == 0
