"""What the router predicts to be reused is what torch workers reuse, turn by turn.

Needs the converted default model: `make setup`, or `radixmesh-convert smollm2`.
"""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixmesh.client import AsyncClient, Sampling
from tests.fakes.up import RunningUp, running_up

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(180)]

SESSIONS = 12
TURNS = 4
AT_ONCE = 4
OPENING_IDS = 64
TURN_IDS = 24
ANSWER = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
# Of each of two groups. Where one request evicts what another was sent for, both are right.
KV_TOKENS = 2560


@dataclass
class Reuse:
    """Sums of ids over finished requests."""

    prompt: float
    possible: float
    predicted: float
    cached: float

    def since(self, before: "Reuse") -> "Reuse":
        return Reuse(
            self.prompt - before.prompt,
            self.possible - before.possible,
            self.predicted - before.predicted,
            self.cached - before.cached,
        )


async def reuse(mesh: RunningUp) -> Reuse:
    """Read the router's counters."""
    async with httpx.AsyncClient() as web:
        page = (await web.get(mesh.facts["metrics"])).text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    names = ("prompt", "possible", "predicted", "cached")
    return Reuse(*(found[f"radixmesh_router_{name}_tokens_total"] for name in names))


async def test_predicted_reuse_is_actual_reuse_within_one_percent(tmp_path: Path) -> None:
    draws = random.Random(3)
    system = [draws.randrange(1000, 40_000) for _ in range(OPENING_IDS)]
    sessions = [
        [*system, *(draws.randrange(1000, 40_000) for _ in range(TURN_IDS))]
        for _ in range(SESSIONS)
    ]
    limit = asyncio.Semaphore(AT_ONCE)

    async def turn(client: AsyncClient, session: list[int]) -> None:
        async with limit:
            answer = await client.complete(session, sampling=ANSWER)
        session += answer.outputs[0].token_ids
        session += [draws.randrange(1000, 40_000) for _ in range(TURN_IDS)]

    flags = (f"--kv-tokens={KV_TOKENS}",)
    async with (
        running_up("smollm2", tmp_path, *flags, engine="torch") as mesh,
        AsyncClient(mesh.grpc) as client,
    ):
        before = await reuse(mesh)
        for number in range(TURNS):
            if number == 1:
                before = await reuse(mesh)  # from here on caches are warm
            async with asyncio.TaskGroup() as tasks:
                for session in sessions:
                    tasks.create_task(turn(client, session))
        steady = (await reuse(mesh)).since(before)
    assert steady.cached > 0.4 * steady.prompt, "too little was reused to prove anything"
    assert steady.predicted == pytest.approx(steady.cached, rel=0.01)
    assert steady.possible >= steady.predicted
