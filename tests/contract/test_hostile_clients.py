"""What clients send wrong is theirs alone: a typed answer, nothing held, no replica blamed."""

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from radixmesh.errors import MeshError, PromptTooLong
from radixmesh.router.v1 import fleet_service_pb2
from radixmesh.rpc.status import from_rpc_error
from tests.fakes.router_mesh import LOOPBACK, RouterMesh, run_mesh

PROMPT = "Once upon a time there was a router that nobody could impress."
GENERATE = "/radixmesh.router.v1.RouterService/Generate"


async def unharmed(mesh: RouterMesh) -> None:
    """It serves, holds nothing, and every replica stands as before."""
    assert mesh.router is not None
    assert not mesh.router.done()
    got = await mesh.generate(PROMPT, 8)
    assert got.text == mesh.text.output(PROMPT, 8)
    await mesh.until_nothing_is_held()
    listed = await mesh.fleet.ListReplicas(fleet_service_pb2.ListReplicasRequest())
    assert [replica.reason for replica in listed.replicas] == [""] * len(listed.replicas)


async def test_bytes_that_are_no_request_end_their_own_call_only(model_dir: Path) -> None:
    chance = random.Random(3)
    async with run_mesh(model_dir, breaker_failures=1) as mesh:
        running = asyncio.create_task(mesh.generate(f"long {PROMPT}", 300))
        async with grpc.aio.insecure_channel(f"{LOOPBACK}:{mesh.ports.grpc}") as channel:
            raw: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)
            for size in [*range(1, 40), 1_000, 100_000]:
                call = raw(chance.randbytes(size), timeout=5)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    [_ async for _ in call]
                reason = from_rpc_error(refused.value).reason
                assert reason in {"INVALID_REQUEST", "MODEL_NOT_SERVED"}, size
        assert (await running).text == mesh.text.output(f"long {PROMPT}", 300)
        await unharmed(mesh)


BAD_FIELDS: list[dict[str, Any]] = [
    {"sampling": {"max_tokens": 2**32 - 1}},
    {"sampling": {"temperature": float("nan")}},
    {"sampling": {"temperature": float("inf")}},
    {"sampling": {"top_p": -0.0001}},
    {"sampling": {"min_tokens": 2**32 - 1}},
    {"sampling": {"repetition_penalty": float("-inf")}},
    {"choice_count": 0},
    {"choice_count": 2**32 - 1},
    {"stop": ["x"] * 10_000},
    {"stop": [""]},
    {"tenant": "t" * 100_000},
    {"session": "s" * 100_000},
    {"cache_salt": "c" * 100_000},
    {"model": "\0"},
]


async def test_values_out_of_all_bounds_are_refused_by_type(model_dir: Path) -> None:
    async with run_mesh(model_dir, breaker_failures=1) as mesh:
        for fields in BAD_FIELDS:
            with pytest.raises(MeshError) as refused:
                await mesh.generate(PROMPT, 8, **fields)
            assert refused.value.code in {"INVALID_ARGUMENT", "NOT_FOUND"}, fields
        assert not [one for worker in mesh.workers for one in worker.submits]
        await unharmed(mesh)


async def test_bodies_that_are_no_request_are_refused_by_type(model_dir: Path) -> None:
    chance = random.Random(4)
    deep = b"[" * 100_000
    bodies = [chance.randbytes(size) for size in (1, 10, 1_000)]
    bodies += [deep, b'{"prompt": ' + deep, b"{}", b"null", b'"x"', b'{"prompt": {"a": 1}}']
    bodies += [b'{"prompt": "x", "max_tokens": ' + value + b"}" for value in (b"1e999", b"-1")]
    bodies += [b'{"prompt": "x", "n": 99999999999999999999}', b'{"prompt": "x", "n": 1e308}']
    async with (
        run_mesh(model_dir, breaker_failures=1) as mesh,
        httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{mesh.ports.http}") as http,
    ):
        for path in ("completions", "chat/completions"):
            for body in bodies:
                headers = {"content-type": "application/json"}
                answer = await http.post(f"/v1/{path}", content=body, headers=headers)
                assert answer.status_code in {400, 422}, (path, body[:40], answer.text)
                assert answer.json()["error"]["message"]
        assert not [one for worker in mesh.workers for one in worker.submits]
        await unharmed(mesh)


async def test_prompts_that_a_replica_refuses_are_not_held_against_it(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=1, breaker_failures=1) as mesh:
        [worker] = mesh.workers
        worker.refuse = [PromptTooLong("too long for me")] * 10
        for _ in range(10):
            with pytest.raises(PromptTooLong):
                await mesh.generate(PROMPT, 8)
        assert len(worker.submits) == 10, "nobody tried them again"
        await unharmed(mesh)
