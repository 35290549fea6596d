"""Two hundred streams through a whole mesh, half of them left at random: nothing remains."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, suppress
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer

from radixmesh.client import AsyncClient, AsyncFleetClient, Sampling
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.pages import page
from tests.fakes.up import RunningUp, running_up

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

STREAMS = 200
DECODE_MS = 20
TOKENS = 60
# No stream ends by itself before that.
LONGEST_STAY_S = TOKENS * DECODE_MS / 1000 - 0.1
# What a mesh holds while nothing runs; everything else on its pages is zero.
AT_REST = {
    "radixmesh_router_links_up_count",
    "radixmesh_router_replicas_count",
    "radixmesh_router_replicas_standing_count",
    "radixmesh_router_tree_blocks_count",
    "radixmesh_tokenizer_links_count",
    "radixmesh_detokenizer_links_count",
    "radixmesh_worker_links_count",
    "radixmesh_worker_ready_count",
    "radixmesh_worker_kv_blocks_count",
    "radixmesh_worker_kv_free_blocks_count",
    "radixmesh_worker_cached_blocks_count",
    "radixmesh_worker_decode_step_seconds",
    "radixmesh_worker_prefill_tokens_per_second",
}


async def over_grpc(client: AsyncClient, prompt: list[int]) -> AsyncGenerator[str, None]:
    async for chunk in client.generate(prompt, sampling=Sampling(max_tokens=TOKENS)):
        yield chunk.text


async def over_http(calls: httpx.AsyncClient, prompt: list[int]) -> AsyncGenerator[str, None]:
    body = {"prompt": prompt, "max_tokens": TOKENS, "stream": True}
    async with calls.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]


async def whole(stream: AsyncIterator[str]) -> str:
    return "".join([text async for text in stream])


async def left(stream: AsyncGenerator[str, None], stay_s: float) -> None:
    """Read for a while, then leave: before the first token, or among tokens."""
    with suppress(TimeoutError):
        async with aclosing(stream), asyncio.timeout(stay_s):
            await whole(stream)
            raise AssertionError("the stream was over before it was left")


async def held(mesh: RunningUp) -> dict[str, object]:
    """What is not as in a mesh where nothing runs, by page and by replica."""
    found: dict[str, object] = {}
    for name, port in mesh.facts["ports"].items():
        if name == "http" or name.endswith("metrics"):
            gauges = (await page(port)).gauges
            found |= {
                f"{name} {gauge}": gauges[gauge] for gauge in gauges if _counts(gauge, gauges)
            }
    async with AsyncFleetClient(mesh.facts["fleet"]) as fleet:
        for one in await fleet.list_replicas():
            counts = (one.running_count, one.waiting_count, one.in_flight_count)
            in_use = one.kv_block_count - one.free_block_count
            if any(counts) or in_use:
                found[f"FleetService {one.group_id}/{one.dp_rank}"] = (*counts, in_use)
    return found


def _counts(gauge: str, gauges: dict[str, float]) -> bool:
    if gauge == "radixmesh_worker_kv_free_blocks_count":
        return gauges[gauge] != gauges["radixmesh_worker_kv_blocks_count"]
    return bool(gauges[gauge]) and gauge not in AT_REST


async def until_nothing_is_held(mesh: RunningUp, within_s: float) -> None:
    found: dict[str, object] = {}
    try:
        async with asyncio.timeout(within_s):
            while found := await held(mesh):
                pass
    except TimeoutError:
        raise AssertionError(f"after {within_s} s: {found}") from None


async def test_two_hundred_streams_half_of_them_cancelled_leave_nothing(
    model_dir: Path, tmp_path: Path
) -> None:
    rng = random.Random(11)
    ordinary = ordinary_ids(model_dir)
    decode = Tokenizer.from_file(str(model_dir / "tokenizer.json")).decode
    prompts = [[rng.choice(ordinary) for _ in range(40)] for _ in range(STREAMS)]
    async with running_up(model_dir, tmp_path, f"--fake-decode-ms={DECODE_MS}") as mesh:
        unlimited = httpx.Limits(max_connections=None)
        async with (
            AsyncClient(mesh.grpc) as client,
            httpx.AsyncClient(base_url=mesh.http, limits=unlimited, timeout=60) as calls,
        ):
            await until_nothing_is_held(mesh, 5)
            streams = [
                over_grpc(client, prompt) if number % 4 < 2 else over_http(calls, prompt)
                for number, prompt in enumerate(prompts)
            ]
            waits: list[Awaitable[str | None]] = [
                left(stream, rng.uniform(0, LONGEST_STAY_S)) if number % 2 else whole(stream)
                for number, stream in enumerate(streams)
            ]
            texts = await asyncio.gather(*waits)
            await until_nothing_is_held(mesh, 2)
    for prompt, text in list(zip(prompts, texts, strict=True))[::2]:
        assert text == decode(list(oracle_output(prompt, ordinary, TOKENS)))
