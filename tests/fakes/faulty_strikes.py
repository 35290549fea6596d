"""The faults of the matrix: what each breaks while streams run, and how it is mended.

A strike returns when the fault is over, or when nothing but time is needed for that.
"""

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import psutil

from radixmesh.client import Replica, View
from tests.fakes.faulty_bench import DIRECT, PROXIED, SLOW, SPOILT, A, B, Bench
from tests.fakes.faulty_feed import AlteredEvent, LostEvents, LyingDigests, Silence, Spoiler
from tests.fakes.faulty_mesh import POLL_S
from tests.fakes.faulty_streams import Stream, Traffic

# Ids that no test waits for.
ENDLESS = 2_000
TWIN = "twin"

Shaping = Callable[[Stream, random.Random, str], None]
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
    shape: Shaping = lambda _stream, _rng, _router: None
    resumes: bool = False
    allowed: tuple[tuple[str, str], ...] = ()
    rest_s: float = 20.0


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
    """Reach a front by a second address: work goes there by the first one only."""

    def stands_back(replicas: Sequence[Replica]) -> bool:
        reasons = {one.reason for one in replicas if one.group_id == TWIN}
        return reasons == {f"the same process as group {SPOILT}"}

    async with bench.mesh.fleet(A) as fleet:
        await fleet.add_group(bench.mesh.address(SPOILT), group_id=TWIN)
        try:
            await bench.mesh.until_fleet(A, stands_back, 10)
            await run_more(bench, traffic)
            (twin,) = [one for one in await fleet.list_replicas() if one.group_id == TWIN]
            assert twin.routed_count == 0
        finally:
            await fleet.remove_group(TWIN)


async def read_slowly(bench: Bench, traffic: Traffic) -> None:
    """Half of the clients take nothing until all others have everything."""
    bench.reader.freeze()
    try:
        await traffic.until(lambda: traffic.ended >= len(traffic.streams) // 2)
        assert traffic.ended < len(traffic.streams), "nobody was slow"
    finally:
        bench.reader.thaw()


def leaves(stream: Stream, rng: random.Random, router: str) -> None:
    """Those that leave asked for so much that only their leaving can end it."""
    if rng.random() < 0.5:
        stream.tokens = ENDLESS
        stream.leaves_at = rng.choice((0, 1, 8, 20, 40))


async def kill_all_workers(bench: Bench, traffic: Traffic) -> None:
    """Nobody is left: some wait for their return, others hear of it when their wait is over."""
    fronts = [bench.mesh.services[name] for name in bench.mesh.shape.groups]
    await asyncio.gather(*(front.kill() for front in fronts))
    await traffic.until(lambda: traffic.ended >= len(traffic.streams) // 2, 30)
    await asyncio.gather(*(front.start() for front in fronts))


def doomed(stream: Stream, rng: random.Random, router: str) -> None:
    """What the router that is killed has at workers would not end by itself."""
    if router == A:
        stream.tokens = ENDLESS


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
    lost = [stream for stream in traffic.streams if stream.tokens == ENDLESS]
    await traffic.until(lambda: all(stream.ended for stream in lost))
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
    "slow reader": Fault(strike=read_slowly, routers=(A, SLOW)),
    "cancel storm": Fault(strike=nothing, shape=leaves, rest_s=5),
    "all workers dead and back": Fault(
        strike=kill_all_workers,
        routers=(A, B),
        resumes=True,
        allowed=((B, "NO_REPLICA_READY"),),
    ),
    "router kill": Fault(
        strike=kill_router,
        shape=doomed,
        routers=(A, B),
        allowed=((A, "SERVICE_UNAVAILABLE"),),
    ),
}
