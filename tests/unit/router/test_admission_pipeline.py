"""What requests on their way hold of places, tokens and rates, whatever ends them and when."""

import asyncio
import random
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from radixmesh.errors import MeshError, PromptTooLong, QueueFull, SlowConsumer
from router.edge.admission import Admission, TokenLimits
from router.edge.tenants import Account, Rate, Tenants
from router.pipeline import Pace, Pipeline
from router.ports import Texts
from router.request import GenerateRequest, Sampling, TextPrompt
from tests.fakes.small_mesh import SmallDecoder, SmallEncoder, SmallFleet

PROMPT = "the quick brown fox"
BUDGET = 1000
PACE = Pace(ready_wait_s=0.05, text_wait_s=0.05, stream_interval_s=0.0, max_pending_bytes=2000)


@dataclass
class Mesh:
    """A pipeline between small services, and what its tenant has left."""

    tokens: int = 0
    queue_timeout_s: float = 5.0
    fleet: SmallFleet = field(default_factory=SmallFleet)
    decoder: SmallDecoder = field(default_factory=SmallDecoder)
    encoder: SmallEncoder = field(default_factory=SmallEncoder)

    def __post_init__(self) -> None:
        self.tenants = Tenants(default=Rate(tokens=BUDGET))
        self.admission = Admission(
            max_concurrent=0,
            max_queued=100,
            queue_timeout_s=self.queue_timeout_s,
            tokens=TokenLimits(max_concurrent=self.tokens),
            tenants=self.tenants,
        )
        self.pipeline = Pipeline(
            self.fleet,
            texts=Texts(self.encoder, self.decoder),
            admit=self.admission.admit,
            pace=PACE,
            rng=random.Random(1),
            on_loss=lambda _, __: None,
        )

    def step(self) -> None:
        self.fleet.step()
        self.decoder.step()

    def account(self) -> Account:
        account = self.tenants.account("a", asyncio.get_running_loop().time())
        assert account is not None
        return account

    def spent(self) -> float:
        """Tokens that the tenant's bucket lacks, but for what came in since."""
        bucket = self.account().tokens
        assert bucket is not None
        return BUDGET - bucket._level

    def assert_empty(self) -> None:
        one = self.admission
        assert (one.running, one.queued, one.tokens, one.queued_tokens) == (0, 0, 0, 0)
        assert not self.fleet.booked
        assert not self.decoder.entries


def ask(count: int = 12, choices: int = 1, **fields: object) -> GenerateRequest:
    return GenerateRequest(
        prompt=TextPrompt(PROMPT),
        sampling=Sampling(max_tokens=count, seed=7),
        choices=choices,
        tenant="a",
        **fields,  # type: ignore[arg-type]
    )


async def run(mesh: Mesh, request: GenerateRequest, *, turns: int | None = None) -> None:
    """Run a request to its end, or close it after so many turns of everything."""

    async def client() -> None:
        async with aclosing(mesh.pipeline.generate(request)) as events:
            async for _ in events:
                pass

    task = asyncio.create_task(client())
    turn = 0
    while not task.done() and turn != turns:
        mesh.step()
        await asyncio.sleep(0)
        turn += 1
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise error


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_whole_request_costs_its_prompt_once_and_every_output(choices: int) -> None:
    mesh = Mesh()
    await run(mesh, ask(12, choices))
    assert mesh.spent() == pytest.approx(len(PROMPT) + 12 * choices, abs=1)
    mesh.assert_empty()


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_cancel_at_any_moment_costs_what_was_chosen_until_then(choices: int) -> None:
    costs = []
    for turns in range(1, 40):
        mesh = Mesh(tokens=1000)
        await run(mesh, ask(12, choices), turns=turns)
        costs.append(mesh.spent())
        mesh.assert_empty()
    # Nothing before a replica had it; the prompt from then on; then every id.
    assert costs[0] == pytest.approx(0, abs=1)
    assert costs[-1] == pytest.approx(len(PROMPT) + 12 * choices, abs=1)
    between = [cost for cost in costs if 1 < cost < costs[-1] - 1]
    assert len(between) > 5
    assert min(between) == pytest.approx(len(PROMPT), abs=choices + 1)


async def test_a_cancel_at_any_moment_of_the_wait_for_tokens_frees_everything() -> None:
    for turns in range(1, 30):
        mesh = Mesh(tokens=50)
        holder = asyncio.create_task(run(mesh, ask(30)))
        await asyncio.sleep(0)
        waiter = asyncio.create_task(run(mesh, ask(30), turns=turns))
        await waiter
        await holder
        mesh.assert_empty()


async def test_a_request_over_the_limit_of_tokens_waits_at_most_its_patience() -> None:
    mesh = Mesh(tokens=50, queue_timeout_s=0.05)
    async with mesh.admission.admit(60) as other:
        await other.take_tokens(50, lambda: 0)
        with pytest.raises(QueueFull):
            await run(mesh, ask(12))
    # It had reserved, and got everything back.
    assert mesh.spent() == pytest.approx(0, abs=1)
    mesh.assert_empty()


async def test_a_request_that_is_wrong_costs_nothing() -> None:
    mesh = Mesh()
    with pytest.raises(PromptTooLong):
        await run(mesh, ask(10_000))
    assert mesh.spent() == 0
    mesh.assert_empty()


async def test_a_request_that_nobody_takes_costs_nothing() -> None:
    mesh = Mesh()
    for replica in mesh.fleet.replicas:
        replica.up = False
    with pytest.raises(MeshError):
        await run(mesh, ask())
    assert mesh.spent() == pytest.approx(0, abs=10)
    mesh.assert_empty()


async def test_a_client_too_slow_pays_what_was_chosen_until_its_end() -> None:
    mesh = Mesh()
    request = ask(490)
    async with aclosing(mesh.pipeline.generate(request)) as events:
        first = asyncio.ensure_future(anext(events))
        while not first.done():
            mesh.step()
            await asyncio.sleep(0)
        # Nobody takes more until the buffer is over its bound and the worker is let go.
        while mesh.fleet.entries:
            mesh.step()
            await asyncio.sleep(0)
        assert mesh.admission.tokens == len(PROMPT) + 490
        with pytest.raises(SlowConsumer):
            async for _ in events:
                pass
    assert len(PROMPT) + 50 < mesh.spent() < len(PROMPT) + 490
    mesh.assert_empty()
