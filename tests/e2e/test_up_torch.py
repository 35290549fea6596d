"""`radixmesh up` on the default model in float32: streams that outlive every process.

Needs the converted default model: `make setup`, or `radixmesh-convert smollm2`.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import pytest
import pytest_asyncio

from radixmesh.client import AsyncClient, Sampling
from tests.fakes.up import RunningUp, running_up

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.timeout(180),
    pytest.mark.asyncio(loop_scope="module"),
]

STREAMS = 32
GREEDY = Sampling(temperature=0.0, max_tokens=8, min_tokens=8, ignore_eos=True)
THINGS = ("river", "bridge", "boat", "child", "lamp", "stone", "garden", "letter")
VERBS = ("saw", "found", "painted", "lost")
PROMPTS = [f"One day the {thing} that I {verb}" for thing in THINGS for verb in VERBS]


@dataclass
class Got:
    """What a client has received."""

    text: str = ""
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Calm:
    """A mesh, and what it says while nothing is killed."""

    mesh: RunningUp
    said: list[Got]


async def ask_all(mesh: RunningUp, middle: Callable[[], None] = lambda: None) -> list[Got]:
    """Run all prompts at once; call `middle` when every stream has a token and none its last."""
    begun = asyncio.Barrier(STREAMS + 1)

    async def stream(client: AsyncClient, prompt: str) -> Got:
        got = Got()
        async for chunk in client.generate(prompt, sampling=GREEDY):
            if not got.ids and chunk.token_ids:
                await begun.wait()
            got.text += chunk.text
            got.ids += chunk.token_ids
        return got

    async with AsyncClient(mesh.grpc) as client, asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(client, prompt)) for prompt in PROMPTS]
        await begun.wait()
        middle()
    return [each.result() for each in streams]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def calm(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Calm, None]:
    folder = tmp_path_factory.mktemp("up")
    flags = ("--dtype=float32", "--stream-interval-ms=0", "--kv-tokens=4096")
    async with running_up("smollm2", folder, *flags, engine="torch") as mesh:
        yield Calm(mesh, await ask_all(mesh))


@pytest.mark.parametrize("victim", ["rank", "worker-1", "detokenizer", "tokenizer"])
async def test_greedy_streams_over_a_kill_are_what_they_are_without_it(
    calm: Calm, victim: str
) -> None:
    pid = calm.mesh.ranks(group=0)[0].pid if victim == "rank" else calm.mesh.facts["pids"][victim]
    assert await ask_all(calm.mesh, lambda: os.kill(pid, signal.SIGKILL)) == calm.said
    assert all(len(got.ids) == GREEDY.max_tokens for got in calm.said)
    await calm.mesh.until_whole()
