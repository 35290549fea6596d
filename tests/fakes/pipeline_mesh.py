"""A pipeline between services in memory that die on command, stepped by a script."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.errors import GroupLost, MeshError
from router.edge.admission import Admission
from router.pipeline import Pace, Pipeline
from router.ports import Texts
from router.request import Event, Finish, GenerateRequest, Sampling, TextPrompt
from tests.fakes.small_mesh import SmallDecoder, SmallEncoder, SmallFleet

PROMPT = "the quick brown fox"
QUICK = Pace(
    request_timeout_s=10.0,
    ready_wait_s=0.05,
    text_wait_s=0.05,
    resume_wait_s=5.0,
    stream_interval_s=0.0,
)


@dataclass
class Mesh:
    """A pipeline and its services. `step` moves everything; `script` is called before."""

    fleet: SmallFleet = field(default_factory=SmallFleet)
    decoder: SmallDecoder = field(default_factory=SmallDecoder)
    encoder: SmallEncoder = field(default_factory=SmallEncoder)
    admission: Admission = field(
        default_factory=lambda: Admission(max_concurrent=0, max_queued=0, queue_timeout_s=1)
    )
    losses: list[tuple[str, str]] = field(default_factory=list)
    steps: int = 0
    # Called before every step, with its number.
    script: Callable[[int], None] = lambda step: None

    def pipeline(self, pace: Pace = QUICK) -> Pipeline:
        return Pipeline(
            self.fleet,
            texts=Texts(self.encoder, self.decoder),
            admit=self.admission.admit,
            pace=pace,
            rng=random.Random(1),
            on_loss=lambda service, reason: self.losses.append((service, reason)),
        )

    def step(self) -> None:
        self.script(self.steps)
        self.steps += 1
        self.fleet.step()
        self.decoder.step()

    async def run(self) -> None:
        while True:
            self.step()
            await asyncio.sleep(0)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                await task

    def assert_nothing_is_held(self) -> None:
        assert not self.fleet.entries
        assert not self.fleet.booked
        assert not self.decoder.entries
        assert self.admission.running == 0
        assert self.admission.queued == 0


def ask(count: int = 12, **changes: object) -> GenerateRequest:
    """A request for so many ids of one prompt."""
    sampling = changes.pop("sampling", Sampling(max_tokens=count, seed=7))
    return GenerateRequest(prompt=TextPrompt(PROMPT), sampling=sampling, **changes)  # type: ignore[arg-type]


@dataclass
class Got:
    """What a client received, by choice."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[tuple[int, bytes, float]] = field(default_factory=list)
    finishes: dict[int, Finish] = field(default_factory=dict)
    events: int = 0

    def add(self, event: Event) -> None:
        self.events += 1
        if isinstance(event, Finish):
            assert event.choice not in self.finishes
            self.finishes[event.choice] = event
            return
        assert event.choice not in self.finishes, "nothing follows a finish"
        self.texts[event.choice] = self.texts.get(event.choice, "") + event.text
        self.ids.setdefault(event.choice, []).extend(unpack_ids(event.ids))
        self.logprobs += [(one.token_id, one.raw, one.logprob) for one in event.logprobs]


async def collect(mesh: Mesh, request: GenerateRequest, pace: Pace = QUICK) -> Got:
    """Run a request to its end."""
    got = Got()
    async with mesh.running(), aclosing(mesh.pipeline(pace).generate(request)) as events:
        async for event in events:
            got.add(event)
    return got


async def failure(mesh: Mesh, request: GenerateRequest, pace: Pace = QUICK) -> MeshError:
    """Run a request that fails; return how."""
    with pytest.raises(MeshError) as caught:
        await collect(mesh, request, pace)
    return caught.value


def kill_serving_replica(
    mesh: Mesh, steps: set[int], error: type[MeshError] = GroupLost
) -> Callable[[int], None]:
    """A script in which, at some steps, who has a stream loses it and is there again at once."""

    def script(step: int) -> None:
        if step not in steps:
            return
        for replica in mesh.fleet.replicas:
            if replica.entries:
                mesh.fleet.kill(replica, error)
                mesh.fleet.revive(replica)

    return script
