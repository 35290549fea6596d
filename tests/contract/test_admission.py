"""Admission as clients meet it: over gRPC and HTTP, on the whole router."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from radixmesh.errors import BadSampling, MeshError, QueueFull, RateLimited
from radixmesh.router.v1 import router_service_pb2 as pb
from tests.fakes.router_mesh import Got, RouterMesh, eventually, run_mesh

PROMPT = "Once upon a time there was a router."
GAUGES = "radixmesh_router_"


@asynccontextmanager
async def http_of(mesh: RouterMesh) -> AsyncGenerator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{mesh.ports.http}") as http:
        yield http


def body(count: int = 8, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": count, "ignore_eos": True, **fields}


async def in_flight(mesh: RouterMesh) -> float:
    return (await mesh.metrics())[GAUGES + "requests_in_flight_count"]


async def until(mesh: RouterMesh, **gauges: float) -> None:
    """Return when the gauges have these values."""
    said: dict[str, float] = {}
    try:
        async with asyncio.timeout(5):
            while True:
                metrics = await mesh.metrics()
                said = {name: metrics[GAUGES + name] for name in gauges}
                if said == gauges:
                    return
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not {gauges} but {said}") from None


async def test_a_cap_of_eight_means_eight_unfinished_bodies_however_they_end(
    model_dir: Path,
) -> None:
    chance = random.Random(5)
    most_at_workers, most_in_flight = 0, 0.0
    flags: dict[str, Any] = {"max_concurrent": 8, "max_queued": 200}
    async with run_mesh(model_dir, shape={"step_s": 0.003}, **flags) as mesh:

        def watch(_: Got) -> None:
            nonlocal most_at_workers
            most_at_workers = max(most_at_workers, mesh.running)

        async def client(number: int) -> None:
            await asyncio.sleep(chance.random())
            asked = mesh.generate(f"{number} {PROMPT}", 20, watch=watch)
            if number % 3 == 0:
                await asked
            elif number % 3 == 1:
                task = asyncio.create_task(asked)
                await asyncio.wait([task], timeout=chance.random())
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            else:
                asked.close()
                with pytest.raises(BadSampling):
                    await mesh.generate(PROMPT, sampling={"temperature": -1.0, "max_tokens": 4})

        clients = asyncio.gather(*(client(number) for number in range(100)))
        while not clients.done():
            most_in_flight = max(most_in_flight, await in_flight(mesh))
            await asyncio.wait([clients], timeout=0.02)
        await clients
        await mesh.until_nothing_is_held()
    assert 1 <= most_at_workers <= 8
    assert 1 <= most_in_flight <= 8


async def test_gauges_are_the_truth_at_all_times(model_dir: Path) -> None:
    async with run_mesh(model_dir, max_concurrent=4) as mesh, http_of(mesh) as http:
        for worker in mesh.workers:
            worker.paused = True
        prompt = len(mesh.text.prompt_ids(PROMPT))
        streams = [asyncio.create_task(mesh.generate(PROMPT, 8)) for _ in range(2)]
        wholes = [asyncio.create_task(http.post("/v1/completions", json=body())) for _ in range(2)]
        await until(mesh, requests_in_flight_count=4, tokens_in_use_count=4 * (prompt + 8))
        late = [asyncio.create_task(mesh.generate(PROMPT, 8, priority=each)) for each in (0, 1)]
        await until(mesh, requests_in_flight_count=4, requests_queued_count=2)
        streams[0].cancel()
        late[0].cancel()
        await until(mesh, requests_in_flight_count=4, requests_queued_count=0)
        wholes[0].cancel()
        await until(mesh, requests_in_flight_count=3, tokens_in_use_count=3 * (prompt + 8))
        for worker in mesh.workers:
            worker.paused = False
        await asyncio.gather(streams[1], wholes[1], late[1])
        # Within one scrape of the last end.
        metrics = await mesh.metrics()
        assert metrics[GAUGES + "requests_in_flight_count"] == 0
        assert metrics[GAUGES + "tokens_in_use_count"] == 0
        await mesh.until_nothing_is_held()


async def test_tokens_of_all_outputs_count_and_the_excess_waits(model_dir: Path) -> None:
    async with run_mesh(model_dir, max_concurrent_tokens=150) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        prompt = len(mesh.text.prompt_ids(PROMPT))
        many = asyncio.create_task(mesh.generate(PROMPT, 20, choice_count=4))
        await until(mesh, tokens_in_use_count=prompt + 80)
        large = asyncio.create_task(mesh.generate(PROMPT, 100))
        await until(mesh, tokens_queued_count=prompt + 100)
        small = asyncio.create_task(mesh.generate(PROMPT, 1))
        await until(mesh, requests_queued_count=2, requests_in_flight_count=1)
        assert len([one for worker in mesh.workers for one in worker.submits]) == 4
        many.cancel()
        await until(mesh, requests_queued_count=0, requests_in_flight_count=2)
        for worker in mesh.workers:
            worker.paused = False
            worker._work.set()
        assert len((await large).ids[0]) == 100
        assert len((await small).ids[0]) == 1
        await mesh.until_nothing_is_held()


async def test_a_request_for_more_than_all_tokens_is_served_alone(model_dir: Path) -> None:
    async with run_mesh(model_dir, max_concurrent_tokens=10) as mesh:
        got = await asyncio.gather(*(mesh.generate(PROMPT, 30) for _ in range(5)))
        assert {one.text for one in got} == {mesh.text.output(PROMPT, 30)}
        await mesh.until_nothing_is_held()


async def refusal(mesh: RouterMesh, **fields: Any) -> tuple[str, float]:
    """The code of a refusal over gRPC and the seconds of its RetryInfo."""
    call = mesh.stub.Generate(pb.GenerateRequest(text=PROMPT, **fields), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(call))
    status = rpc_status.from_call(caught.value)
    assert status is not None
    retry, info = error_details_pb2.RetryInfo(), error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(retry) for detail in status.details)
    assert any(detail.Unpack(info) for detail in status.details)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return info.reason, retry.retry_delay.ToMilliseconds() / 1000


async def test_a_saturated_router_says_when_to_come_again_on_both_edges(model_dir: Path) -> None:
    flags: dict[str, Any] = {"max_concurrent": 1, "max_queued": 1}
    async with run_mesh(model_dir, **flags) as mesh, http_of(mesh) as http:
        for worker in mesh.workers:
            worker.paused = True
        running = [asyncio.create_task(mesh.generate(PROMPT)) for _ in range(2)]
        await until(mesh, requests_in_flight_count=1, requests_queued_count=1)
        assert (await refusal(mesh))[0] == "QUEUE_FULL"
        assert (await refusal(mesh))[1] >= 1
        answer = await http.post("/v1/completions", json=body())
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(answer.headers["retry-after"]) >= 1
        for task in running:
            task.cancel()
        await mesh.until_nothing_is_held()


async def test_a_tenants_rate_holds_on_both_edges_and_its_hint_is_exact(model_dir: Path) -> None:
    limits = {"acme": {"tokens_per_minute": 600}}
    async with run_mesh(model_dir, tenant_limits=limits) as mesh, http_of(mesh) as http:
        prompt_count = len(mesh.text.prompt_ids(PROMPT))
        # Reserves what it may use, settles what it did: the model stops at once.
        stop = mesh.text.output_ids(PROMPT, 1)
        sampling = {"max_tokens": 500, "stop_token_ids": stop}
        for _ in range(3):
            await mesh.generate(PROMPT, sampling=sampling, tenant="acme")
        left = 600 - 3 * (prompt_count + 1)
        reason, wait_s = await refusal(mesh, sampling={"max_tokens": 590}, tenant="acme")
        assert reason == "RATE_LIMITED"
        missing = min(600, prompt_count + 590) - left
        assert wait_s == pytest.approx(missing / 10, abs=1.0)
        answer = await http.post("/v1/completions", json=body(590, user="acme"))
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) == pytest.approx(missing / 10, abs=2)
        assert answer.json()["error"]["param"] == "user"
        # Others are not concerned.
        assert (await http.post("/v1/completions", json=body(user="b"))).status_code == 200
        await mesh.generate(PROMPT, sampling={"max_tokens": 700, "stop_token_ids": stop})
        await mesh.until_nothing_is_held()


@pytest.mark.parametrize("how", ["cancel", "all workers gone"])
async def test_an_aborted_request_pays_for_what_it_used(model_dir: Path, how: str) -> None:
    flags: dict[str, Any] = {"tenant_tokens_per_minute": 600, "resume_wait_s": 0.2}
    async with run_mesh(model_dir, workers=1, shape={"step_s": 0.01}, **flags) as mesh:
        began = asyncio.Event()

        def watch(got: Got) -> None:
            if len(got.ids.get(0, ())) >= 60:
                began.set()

        task = asyncio.create_task(mesh.generate(PROMPT, 580, watch=watch, tenant="a"))
        await began.wait()
        assert (await refusal(mesh, sampling={"max_tokens": 200}, tenant="a"))[0] == "RATE_LIMITED"
        if how == "cancel":
            task.cancel()
        else:
            mesh.workers[0].stop_replica(0)
        assert (await asyncio.gather(task, return_exceptions=True))[0] is not None
        await mesh.until_nothing_is_held()
        if how != "cancel":
            mesh.workers[0].restart_replica(0)
            await eventually(lambda: mesh.workers[0].replicas[0].state == 1)
        # Most of it has come back.
        stop = mesh.text.output_ids(PROMPT, 1)
        sampling = {"max_tokens": 100, "stop_token_ids": stop}
        await mesh.generate(PROMPT, sampling=sampling, tenant="a")
        # But not what was used.
        assert (await refusal(mesh, sampling={"max_tokens": 590}, tenant="a"))[0] == "RATE_LIMITED"


async def test_a_request_that_no_replica_got_costs_nothing(model_dir: Path) -> None:
    flags: dict[str, Any] = {"tenant_tokens_per_minute": 600, "ready_wait_s": 0.05}
    async with run_mesh(model_dir, workers=1, **flags) as mesh:
        mesh.workers[0].stop_replica(0)
        for _ in range(5):
            with pytest.raises(MeshError) as error:
                await mesh.generate(PROMPT, 500, tenant="a")
            assert error.value.code == "UNAVAILABLE"


async def test_who_still_waits_when_the_grace_is_over_is_told_too(model_dir: Path) -> None:
    flags: dict[str, Any] = {"max_concurrent": 1, "drain_grace_s": 0.1}
    async with run_mesh(model_dir, **flags) as mesh, http_of(mesh) as http:
        for worker in mesh.workers:
            worker.paused = True
        streams = [asyncio.create_task(mesh.generate(PROMPT)) for _ in range(2)]
        post = asyncio.create_task(http.post("/v1/completions", json=body()))
        await until(mesh, requests_in_flight_count=1, requests_queued_count=2)
        mesh.stop.set()
        ends = await asyncio.gather(*streams, return_exceptions=True)
        assert [end.reason for end in ends if isinstance(end, MeshError)] == ["DRAINING"] * 2
        answer = await post
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_classes_are_served_in_order_over_the_wire(model_dir: Path) -> None:
    async with run_mesh(model_dir, max_concurrent=1) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        order: list[int] = []

        async def client(priority: int) -> None:
            await mesh.generate(
                PROMPT, 4, priority=priority, watch=lambda got: order.append(priority)
            )

        first = asyncio.create_task(client(0))
        await until(mesh, requests_in_flight_count=1)
        others = []
        for number, priority in enumerate((-3, 7, 2), start=1):
            others.append(asyncio.create_task(client(priority)))
            await until(mesh, requests_queued_count=number)
        for worker in mesh.workers:
            worker.paused = False
            worker._work.set()
        await asyncio.gather(first, *others)
        assert list(dict.fromkeys(order)) == [0, 7, 2, -3]


async def test_load_is_shared_evenly_by_streams_over_grpc(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape={"max_running": 256}) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        streams: list[asyncio.Task[Got]] = []
        while len(streams) < 60:
            prompts = (f"{len(streams) + each} is a number of its own" for each in range(10))
            streams += [asyncio.create_task(mesh.generate(one, 100)) for one in prompts]
            await until(mesh, requests_in_flight_count=len(streams))
        await eventually(lambda: mesh.running == 60)
        shares = [worker.running for worker in mesh.workers]
        assert max(shares) / min(shares) <= 1.3
        for stream in streams:
            stream.cancel()
        await mesh.until_nothing_is_held()


async def test_a_wait_that_is_too_long_is_refused_and_holds_nothing(model_dir: Path) -> None:
    flags: dict[str, Any] = {"max_concurrent_tokens": 10, "queue_timeout_s": 0.1}
    async with run_mesh(model_dir, **flags) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        running = asyncio.create_task(mesh.generate(PROMPT))
        await until(mesh, requests_in_flight_count=1)
        with pytest.raises(QueueFull, match="too long"):
            await mesh.generate(PROMPT)
        await until(mesh, requests_in_flight_count=1, requests_queued_count=0)
        running.cancel()
        await mesh.until_nothing_is_held()


async def test_an_http_stream_refused_for_its_tenant_is_no_stream(model_dir: Path) -> None:
    async with run_mesh(model_dir, tenant_requests_per_minute=1) as mesh, http_of(mesh) as http:
        asked = body(2, stream=True, user="a")
        async with http.stream("POST", "/v1/completions", json=asked) as first:
            assert "[DONE]" in [line async for line in first.aiter_lines() if line][-1]
        second = await http.post("/v1/completions", json=asked)
        assert second.status_code == 429
        assert json.loads(second.text)["error"]["type"] == "rate_limit_error"
        with pytest.raises(RateLimited):
            await mesh.generate(PROMPT, tenant="a")
