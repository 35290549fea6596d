"""One prompt by every way in: the same ids, so the same keys, so the same prefix is found."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.common.v1.generation_pb2 import ChatMessage, ChatPrompt
from radixmesh.router.v1 import router_service_pb2 as pb
from tests.fakes.router_mesh import LOOPBACK, RouterMesh, run_mesh

STORY = "Once upon a time there was a small model that lived in a cache and said little, to few."
TURNS = [
    {"role": "system", "content": "You answer with one word, and never with two of them."},
    {"role": "user", "content": STORY},
]
SAID = ChatPrompt(messages=[ChatMessage(**turn) for turn in TURNS])
Ask = Callable[[RouterMesh, httpx.AsyncClient, list[int]], Awaitable[int]]


async def grpc(mesh: RouterMesh, request: pb.GenerateRequest) -> int:
    """Return how many ids of the prompt were reused."""
    request.sampling.max_tokens = 2
    last = [message async for message in mesh.stub.Generate(request)][-1]
    return int(last.finish.usage.cached_tokens)


async def post(http: httpx.AsyncClient, path: str, **fields: Any) -> int:
    answer = await http.post(f"/v1/{path}", json={"max_tokens": 2, **fields})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def events(http: httpx.AsyncClient, path: str, **fields: Any) -> int:
    asked = {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}, **fields}
    async with http.stream("POST", f"/v1/{path}", json=asked) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    usage = json.loads(lines[-1].removeprefix("data: "))["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


PARTS = [
    {**turn, "content": [{"type": "text", "text": part} for part in turn["content"].partition(" ")]}
    for turn in TURNS
]
TEXT: dict[str, Ask] = {
    "grpc text": lambda mesh, http, ids: grpc(mesh, pb.GenerateRequest(text=STORY)),
    "grpc ids": lambda mesh, http, ids: grpc(
        mesh, pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids))
    ),
    "completion": lambda mesh, http, ids: post(http, "completions", prompt=STORY),
    "streamed completion": lambda mesh, http, ids: events(http, "completions", prompt=STORY),
    "completion of one in a list": lambda mesh, http, ids: post(
        http, "completions", prompt=[STORY]
    ),
    "completion of ids": lambda mesh, http, ids: post(http, "completions", prompt=ids),
}
CHAT: dict[str, Ask] = {
    "grpc chat": lambda mesh, http, ids: grpc(mesh, pb.GenerateRequest(chat=SAID)),
    "chat": lambda mesh, http, ids: post(http, "chat/completions", messages=TURNS),
    "streamed chat": lambda mesh, http, ids: events(http, "chat/completions", messages=TURNS),
    "chat in parts": lambda mesh, http, ids: post(http, "chat/completions", messages=PARTS),
    "completion of its ids": lambda mesh, http, ids: post(http, "completions", prompt=ids),
}


@asynccontextmanager
async def meshed(
    model_dir: Path, workers: int = 3
) -> AsyncGenerator[tuple[RouterMesh, httpx.AsyncClient]]:
    async with (
        run_mesh(model_dir, workers=workers) as mesh,
        httpx.AsyncClient(base_url=f"http://{LOOPBACK}:{mesh.ports.http}") as http,
    ):
        yield mesh, http


@pytest.mark.parametrize("ways", [TEXT, CHAT], ids=["text", "chat"])
async def test_what_came_by_one_way_in_is_found_by_every_other(
    model_dir: Path, ways: dict[str, Ask]
) -> None:
    async with meshed(model_dir) as (mesh, http):
        first, *others = ways.items()
        assert await first[1](mesh, http, []) == 0
        [home] = [worker for worker in mesh.workers if worker.submits]
        ids = unpack_ids(home.submits[0].prompt_ids).tolist()
        size = home.shape.block_tokens
        whole = len(ids) // size * size
        assert whole < len(ids), "there must be an id left to compute"
        await mesh.until_cached(f"g{mesh.workers.index(home)}", len(ids) // size)
        for name, way in others:
            assert await way(mesh, http, ids) == whole, name
        assert len(home.submits) == len(ways)
        assert {submit.prompt_ids for submit in home.submits} == {home.submits[0].prompt_ids}


async def over_grpc(mesh: RouterMesh, http: httpx.AsyncClient, salt: str) -> int:
    return await grpc(mesh, pb.GenerateRequest(text=STORY, cache_salt=salt))


async def over_http(mesh: RouterMesh, http: httpx.AsyncClient, salt: str) -> int:
    return await post(http, "completions", prompt=STORY, cache_salt=salt)


async def test_salts_never_share_whatever_way_they_came_in(model_dir: Path) -> None:
    async with meshed(model_dir, workers=1) as (mesh, http):
        for first, second, salt in (
            (over_grpc, over_http, "a"),
            (over_http, over_grpc, "b"),
            (over_grpc, over_http, ""),
        ):
            assert await first(mesh, http, salt) == 0, "what others hold is no hit"
            whole = await second(mesh, http, salt)
            assert whole > 0
        for salt in ("a", "b", "", "b", "a"):
            assert await over_grpc(mesh, http, salt) == whole
        assert await over_grpc(mesh, http, "c") == 0
        metrics = await mesh.metrics()
        predicted = metrics["radixmesh_router_predicted_tokens_total"]
        assert predicted == metrics["radixmesh_router_cached_tokens_total"] > 0
