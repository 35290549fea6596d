"""Every request is counted once, however it ends."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from radixmesh.errors import MeshError, QueueFull
from radixmesh.telemetry.metrics import RouterMetrics
from router.edge.metered import Metered
from router.request import Delta, Event, GenerateRequest, TextPrompt
from tests.fakes.pipeline import HANG, ScriptedPipeline, finish, words

REQUEST = GenerateRequest(prompt=TextPrompt("hi"))


class Bench:
    def __init__(self, script: Sequence[Event | MeshError | Exception | str]) -> None:
        self.metrics = RouterMetrics(CollectorRegistry())
        self.now = 10.0
        scripted: Any = ScriptedPipeline(script)
        self.pipeline = Metered(scripted, self.metrics, edge="grpc", clock=lambda: self.now)

    def value(self, name: str, **labels: str) -> float:
        found = self.metrics.registry.get_sample_value(f"radixmesh_router_{name}", labels)
        return found or 0.0

    def outcomes(self, outcome: str) -> float:
        return self.value("requests_total", edge="grpc", outcome=outcome)

    async def run(self) -> None:
        async with aclosing(self.pipeline.generate(REQUEST)) as events:
            async for _ in events:
                self.now += 0.5


async def test_a_request_that_finishes_is_counted_with_its_tokens() -> None:
    bench = Bench(words("a|b|c"))
    await bench.run()
    assert bench.outcomes("finished") == 1
    assert bench.value("completion_tokens_total") == 3
    assert bench.value("prompt_tokens_total") == 40
    assert bench.value("cached_tokens_total") == 32
    assert bench.value("predicted_tokens_total") == 32
    assert bench.value("first_token_seconds_count") == 1
    assert bench.value("inter_token_seconds_sum") == 1.0
    assert bench.value("request_seconds_sum") == 2.0


async def test_the_prompt_of_several_outputs_counts_once() -> None:
    bench = Bench([Delta(0, "a", b"1234"), finish(0), finish(1)])
    await bench.run()
    assert bench.value("prompt_tokens_total") == 40


async def test_a_request_that_fails_is_counted_by_its_reason() -> None:
    bench = Bench([*words("a")[:1], QueueFull("full")])
    with pytest.raises(QueueFull):
        await bench.run()
    assert bench.outcomes("QUEUE_FULL") == 1
    assert bench.outcomes("finished") == 0


async def test_a_client_that_leaves_is_counted_as_cancelled() -> None:
    bench = Bench([*words("a")[:1], HANG])
    task = asyncio.create_task(bench.run())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert bench.outcomes("cancelled") == 1
    assert bench.value("request_seconds_count") == 1


async def test_a_request_that_a_bug_ends_is_counted_as_that() -> None:
    bench = Bench([*words("a")[:1], RuntimeError("a bug")])
    with pytest.raises(RuntimeError):
        await bench.run()
    assert bench.outcomes("INTERNAL") == 1
    assert bench.outcomes("cancelled") == 0
