"""Faults while streams run, over real processes: no id is lost, doubled or reordered, no hang.

One mesh takes one fault after the other; after each it must be as before: nothing held,
every view proven, no process grown. `-rP` shows how long each took.
"""

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from radixmesh.client import View
from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceStub
from tests.fakes.faulty_feed import (
    AlteredEvent,
    FeedProxy,
    LostEvents,
    LyingDigests,
    Silence,
    Spoiler,
    feed_proxy_to,
)
from tests.fakes.faulty_mesh import LOOPBACK, POLL_S, FaultyMesh, Shape
from tests.fakes.faulty_rest import Footprints, sample, until_nothing_is_held
from tests.fakes.faulty_streams import MIDWAY_IDS, Said, Stream, Traffic, stub_of
from tests.fakes.tcp_proxy import TcpProxy, proxy_to

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]

A, B = "router-a", "router-b"
DIRECT, SPOILT, PROXIED = "worker-0", "worker-1", "worker-2"


@dataclass(frozen=True)
class Size:
    """How much runs at once."""

    streams: int
    tokens: int
    timeout_s: float


SHORT = Size(streams=200, tokens=50, timeout_s=60)
LONG = Size(streams=2_000, tokens=60, timeout_s=240)


class Bench:
    """The mesh and what stands in its ways."""

    def __init__(self, mesh: FaultyMesh, said: Said, feed: FeedProxy, link: TcpProxy) -> None:
        self.mesh = mesh
        self.said = said
        self.feed = feed
        self.link = link
        self.footprints = Footprints()
        self.stubs: dict[str, RouterServiceStub] = {}

    def pid(self, service: str) -> int:
        return self.mesh.services[service].pid

    async def metric(self, router: str, name: str, **labels: str) -> float:
        port = self.mesh.ports[f"{router}-metrics"]
        return await sample(port, f"radixmesh_router_{name}", **labels)

    async def connect(self, stack: AsyncExitStack) -> None:
        for router in (A, B):
            address = self.mesh.address(router)
            self.stubs[router] = await stack.enter_async_context(stub_of(address))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Bench, None]:
    shape = Shape(
        dps=(2, 1, 1),
        routers=(A, B),
        worker_flags=(
            *("--fake-decode-ms=20", "--fake-prefill-tokens-per-s=40000"),
            *("--fake-kv-blocks=16384", "--max-running=512"),
            *("--max-waiting=4096", "--max-failures=0"),
        ),
        # One router has patience, the other has none.
        flags_of={A: ("--ready-wait-s=30",), B: ("--ready-wait-s=2", "--resume-wait-s=2")},
    )
    mesh = FaultyMesh(model_dir, tmp_path_factory.mktemp("faults"), shape)
    async with AsyncExitStack() as stack:
        feed = await stack.enter_async_context(feed_proxy_to(mesh.address(SPOILT)))
        link = await stack.enter_async_context(proxy_to(mesh.ports[PROXIED]))
        mesh.ways[A, SPOILT] = f"{LOOPBACK}:{feed.port}"
        mesh.ways[A, PROXIED] = f"{LOOPBACK}:{link.port}"
        await stack.enter_async_context(mesh.running())
        bench = Bench(mesh, Said(model_dir), feed, link)
        await bench.connect(stack)
        yield bench


Strike = Callable[[Bench, Traffic], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What is done while streams run.

    Attributes:
        strike: Does it when half of the streams are midway, and mends it.
        prepare: What is done before streams run.
        routers: Whose streams run.
        shape: What becomes of a stream's client, by the stream's number.
        resumes: Whether streams must have changed their place, or nothing was provoked.
        allowed: Errors that a stream may end by, by the name of its router.
        rest_s: How long until everything is as before.
    """

    strike: Strike
    prepare: Callable[[Bench], Awaitable[None]] | None = None
    routers: tuple[str, ...] = (A,)
    shape: Callable[[Stream, random.Random], None] = lambda _stream, _rng: None
    resumes: bool = False
    allowed: tuple[tuple[str, str], ...] = ()
    rest_s: float = 20.0


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
        fault.shape(stream, rng)
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
        f"at rest after {time.monotonic() - began:.1f} s; begun at {traffic.places}\n"
    )


async def nothing(bench: Bench, traffic: Traffic) -> None:
    """Break nothing."""


async def kill_rank(bench: Bench, traffic: Traffic) -> None:
    bench.mesh.services[DIRECT].ranks()[0].kill()


async def kill_front(bench: Bench, traffic: Traffic) -> None:
    await bench.mesh.services[SPOILT].kill()
    await bench.mesh.services[SPOILT].start()


async def stop_rank(bench: Bench, traffic: Traffic) -> None:
    rank = bench.mesh.services[DIRECT].ranks()[-1]
    rank.suspend()
    # It never wakes up: its front gives it up.
    gone, _ = await asyncio.to_thread(psutil.wait_procs, [rank], timeout=20)
    assert gone


async def stop_front(bench: Bench, traffic: Traffic) -> None:
    front = bench.mesh.services[PROXIED]
    lost = await bench.metric(A, "links_lost_total", service="worker")
    front.send(signal.SIGSTOP)
    try:
        await until_more(bench, lost, "links_lost_total", service="worker")
        await traffic.until_all_ended()
    finally:
        front.send(signal.SIGCONT)


async def cut_link(bench: Bench, traffic: Traffic) -> None:
    bench.link.cut()


async def until(ready: Callable[[], Awaitable[bool]], within_s: float) -> None:
    """Look again and again."""
    async with asyncio.timeout(within_s):
        while True:
            if await ready():
                return
            await asyncio.sleep(POLL_S)


async def until_more(bench: Bench, than: float, name: str, **labels: str) -> None:
    """Wait until a router has counted more."""

    async def counted() -> bool:
        return await bench.metric(A, name, **labels) > than

    await until(counted, 30)


async def forgive(bench: Bench) -> None:
    """Let the router meet the group anew: too many losses of a view in a minute rest it."""
    lost = await bench.metric(A, "links_lost_total", service="worker")
    bench.feed.hang_up()
    await until_more(bench, lost, "links_lost_total", service="worker")
    await bench.mesh.until_exact()


async def run_more(bench: Bench, traffic: Traffic) -> None:
    """Have more streams placed, as things are now, and begin."""
    more = [Stream(each) for each in bench.said.prompts(7, len(traffic.streams) // 2)]
    traffic.start(bench.stubs[A], more)
    await traffic.until(lambda: sum(len(each.ids) > 0 for each in more) >= len(more) // 2)


async def spoil(bench: Bench, traffic: Traffic, fault: Spoiler, cause: str) -> None:
    """Spoil the feed until the router has noticed."""
    before = await bench.metric(A, "view_losses_total", cause=cause)
    bench.feed.fault = fault
    try:
        await until_more(bench, before, "view_losses_total", cause=cause)
    finally:
        bench.feed.fault = None
    assert fault.acted


async def lose_events(bench: Bench, traffic: Traffic) -> None:
    await spoil(bench, traffic, LostEvents(), "gap")


async def silence(bench: Bench, traffic: Traffic) -> None:
    await spoil(bench, traffic, Silence(), "silence")


async def alter_event(bench: Bench, traffic: Traffic) -> None:
    """The proof is wrong, or before that a block has no parent."""

    async def losses() -> float:
        causes = ("digest", "contradiction")
        return sum([await bench.metric(A, "view_losses_total", cause=cause) for cause in causes])

    async def lost() -> bool:
        return await losses() > before

    before = await losses()
    bench.feed.fault = fault = AlteredEvent()
    try:
        await until(lost, 10)
    finally:
        bench.feed.fault = None
    assert fault.acted


async def lie_in_digests(bench: Bench, traffic: Traffic) -> None:
    """As long as proofs fail the view is not trusted, and after some of them not asked for."""
    bench.feed.fault = LyingDigests()
    try:
        await bench.mesh.until_fleet(
            A,
            lambda replicas: View.BLIND in {one.view for one in replicas if one.group_id == SPOILT},
            within_s=15,
        )
        assert await bench.metric(A, "replicas_count", phase="ready", view="blind") == 1
        assert await bench.metric(A, "view_losses_total", cause="digest") >= 1
        await run_more(bench, traffic)
    finally:
        bench.feed.fault = None


async def add_a_twin(bench: Bench, traffic: Traffic) -> None:
    """Reach a front by a second address, give it work there, and take the address away."""
    async with bench.mesh.fleet(A) as fleet:
        await fleet.add_group(bench.mesh.address(SPOILT), group_id="twin")
        try:
            await bench.mesh.until_fleet(
                A, lambda replicas: any(one.group_id == "twin" for one in replicas)
            )
            await run_more(bench, traffic)
        finally:
            await fleet.remove_group("twin")


def rests(stream: Stream, rng: random.Random) -> None:
    if rng.random() < 0.5:
        stream.rests_at = MIDWAY_IDS


async def read_slowly(bench: Bench, traffic: Traffic) -> None:
    """Half of the clients read on when all others have everything."""
    slow = [stream for stream in traffic.streams if stream.rests_at is not None]
    await traffic.until(lambda: traffic.ended == len(traffic.streams) - len(slow))
    assert not any(stream.ended for stream in slow)
    for stream in slow:
        stream.goes_on.set()


def leaves(stream: Stream, rng: random.Random) -> None:
    if rng.random() < 0.5:
        stream.leaves_at = rng.choice((0, 1, 8, 20, 40))


async def kill_all_workers(bench: Bench, traffic: Traffic) -> None:
    """Nobody is left: some wait for their return, others hear of it when their wait is over."""
    fronts = [bench.mesh.services[name] for name in bench.mesh.shape.groups]
    ended = traffic.ended
    await asyncio.gather(*(front.kill() for front in fronts))
    b_streams = len(traffic.streams) // 2
    await traffic.until(lambda: traffic.ended - ended >= b_streams - ended, 30)
    await asyncio.gather(*(front.start() for front in fronts))


async def kill_router(bench: Bench, traffic: Traffic) -> None:
    """Its clients are told, and are served by the other router; the workers let go at once."""
    router = bench.mesh.services[A]
    await router.kill()
    half = len(traffic.streams) // 2
    await bench.mesh.until_fleet(
        B,
        lambda replicas: sum(one.running_count + one.waiting_count for one in replicas) <= half,
        within_s=5,
    )
    lost = [stream for stream in traffic.streams if stream.error]
    traffic.start(bench.stubs[B], [Stream(stream.prompt) for stream in lost])
    await router.start()


FAULTS = {
    "no fault": Fault(strike=nothing, routers=(A, B)),
    "rank kill": Fault(strike=kill_rank, resumes=True),
    "front kill": Fault(strike=kill_front, resumes=True),
    "link cut": Fault(strike=cut_link, resumes=True),
    "rank stopped": Fault(strike=stop_rank, resumes=True),
    "front stopped": Fault(strike=stop_front, resumes=True),
    "feed gap": Fault(strike=lose_events, prepare=forgive),
    "altered event": Fault(strike=alter_event, prepare=forgive),
    "digest lie": Fault(strike=lie_in_digests, prepare=forgive),
    "duplicate instance": Fault(strike=add_a_twin),
    "silent feed": Fault(strike=silence, prepare=forgive),
    "slow reader": Fault(strike=read_slowly, shape=rests),
    "cancel storm": Fault(strike=nothing, shape=leaves),
    "all workers dead and back": Fault(
        strike=kill_all_workers,
        routers=(A, B),
        resumes=True,
        allowed=((B, "NO_REPLICA_READY"),),
    ),
    "router kill": Fault(strike=kill_router, routers=(A, B), allowed=((A, "SERVICE_UNAVAILABLE"),)),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_streams_outlive(bench: Bench, fault: str) -> None:
    await endure(bench, fault, SHORT)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
async def test_two_thousand_streams_outlive(bench: Bench, fault: str) -> None:
    await endure(bench, fault, LONG)
