"""Faults while streams run, over real processes: no id is lost, doubled or reordered, no hang.

One mesh takes one fault after the other; after each it must be as before: nothing held,
every view proven, no process grown. `-rP` shows how long each took.
"""

import random
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.faulty_bench import Bench, running_bench
from tests.fakes.faulty_rest import until_nothing_is_held
from tests.fakes.faulty_streams import Stream, Traffic
from tests.fakes.faulty_strikes import FAULTS

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]


@dataclass(frozen=True)
class Size:
    """How much runs at once."""

    streams: int
    tokens: int
    timeout_s: float


SHORT = Size(streams=200, tokens=50, timeout_s=60)
LONG = Size(streams=2_000, tokens=60, timeout_s=240)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Bench, None]:
    async with running_bench(model_dir, tmp_path_factory.mktemp("faults")) as bench:
        yield bench


async def endure(bench: Bench, name: str, size: Size) -> None:
    """Run streams, break something in their middle, and see that nothing shows."""
    fault, rng = FAULTS[name], random.Random(name)
    if fault.prepare:
        await fault.prepare(bench)
    traffic = Traffic(bench.said, tokens=size.tokens, timeout_s=size.timeout_s)
    began = time.monotonic()
    router_of: dict[Stream, str] = {}
    places = bench.mesh.shape.places
    prompts = bench.said.prompts(rng.randrange(1 << 30), size.streams)
    for number, prompt in enumerate(prompts):
        # Half of them go where the router likes, the others everywhere.
        stream = Stream(prompt, hint=rng.choice(places) if rng.random() < 0.5 else None)
        router_of[stream] = fault.routers[number % len(fault.routers)]
        fault.shape(stream, rng, router_of[stream])
        traffic.start(bench.stubs[router_of[stream]], [stream])
    try:
        await traffic.until(lambda: traffic.midway + traffic.ended >= size.streams // 2)
        midway = traffic.midway
        await fault.strike(bench, traffic)
        await traffic.until_all_ended()
    finally:
        traffic.stop()
    ended_s = time.monotonic() - began
    traffic.check(
        lambda stream: (
            (router_of[stream], stream.error.reason if stream.error else "") in fault.allowed
        )
    )
    assert traffic.resumed or not fault.resumes, "no stream was there: the test provoked nothing"
    await until_nothing_is_held(bench.mesh, fault.rest_s)
    grown = bench.footprints.grown(bench.mesh, size.streams)
    assert not grown
    errors = sum(stream.error is not None for stream in traffic.streams)
    sys.stdout.write(
        f"{name}: {len(traffic.streams)} streams, {midway} midway at the fault, "
        f"{traffic.resumed} resumed, {errors} allowed errors; ended after {ended_s:.1f} s, "
        f"at rest after {time.monotonic() - began:.1f} s; begun at {traffic.places}, "
        f"left out {await bench.mesh.left_out()}\n"
    )


@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_outlive(bench: Bench, fault: str) -> None:
    await endure(bench, fault, SHORT)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
async def test_two_thousand_streams_outlive(bench: Bench, fault: str) -> None:
    await endure(bench, fault, LONG)
