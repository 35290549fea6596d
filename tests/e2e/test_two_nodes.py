"""A group on two hosts, each a network namespace: same ids, and a cut cable that heals.

Runs where network namespaces are permitted.
"""

import asyncio
import shutil
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from radixmesh import errors
from radixmesh.settings import child_environment
from tests.fakes.namespaces import TwoHosts, two_hosts, unavailable
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.router_end import DOWN, RouterEnd, attach

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

PORT = 30100
PROMPT = list(range(20, 60))


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if why := unavailable():
        pytest.skip(why)
    with two_hosts() as hosts:
        yield hosts


@asynccontextmanager
async def node(hosts: TwoHosts, number: int, *flags: str) -> AsyncGenerator[None, None]:
    """Run the worker on a host; it is gone at the block's end."""
    process = await asyncio.create_subprocess_exec(
        *(*hosts.on(number), sys.executable, "-m", "worker", *flags),
        *("--tp", "2", "--nnodes", "2", "--node-rank", str(number), "--threads", "1"),
        *("--rendezvous", f"{hosts.inside[0]}:29500"),
        *("--host", hosts.outside, "--port", str(PORT)),
        env=child_environment(),
        start_new_session=True,
    )
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@asynccontextmanager
async def group(hosts: TwoHosts, *flags: str) -> AsyncGenerator[RouterEnd, None]:
    """Run a group on both hosts; yields a router's link to it."""
    async with (
        node(hosts, 0, *flags),
        node(hosts, 1, *flags),
        attach(f"{hosts.outside}:{PORT}") as router,
    ):
        async with asyncio.timeout(60):
            await router.until_up(0)
        yield router


async def test_a_cut_cable_fails_what_runs_within_seconds_and_heals(
    hosts: TwoHosts, model_dir: Path
) -> None:
    flags = ("--model", str(model_dir), "--engine", "fake", "--fake-decode-ms", "10")
    expected = oracle_output(PROMPT, ordinary_ids(model_dir), 20)
    async with group(hosts, *flags) as router:
        assert await router.submit(PROMPT, max_tokens=20).result() == expected
        running = router.submit(PROMPT, max_tokens=3000)
        await running.begun.wait()
        hosts.cut()
        async with asyncio.timeout(10):
            assert isinstance(await running.failure(), errors.GroupLost)
        assert router.state(0) == DOWN
        hosts.heal()
        async with asyncio.timeout(60):
            await router.until_up(0)
        assert await router.submit(PROMPT, max_tokens=20).result() == expected


async def test_a_model_split_over_two_hosts_gives_the_ids_of_the_whole_one(
    hosts: TwoHosts, model_dir: Path, tmp_path: Path
) -> None:
    from tests.fakes.tiny_models import generate, make_tiny_model

    folder = make_tiny_model(tmp_path / "tiny", "llama")
    shutil.copy(model_dir / "tokenizer.json", folder)
    flags = ("--model", str(folder), "--dtype", "float32", "--kv-tokens", "1024")
    async with group(hosts, *flags) as router:
        output = router.submit(PROMPT, max_tokens=12)
        assert await output.result() == generate(folder, PROMPT, 12)
