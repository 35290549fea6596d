"""Several routers before one fleet, as real processes: they share nothing and still agree."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from radixmesh.client import Replica
from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceStub
from tests.fakes.faulty_mesh import LOOPBACK, FaultyMesh, Shape
from tests.fakes.faulty_rest import sample, until_nothing_is_held
from tests.fakes.faulty_streams import Said, Stream, Traffic, stub_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(90),
    pytest.mark.asyncio(loop_scope="module"),
]

ROUTERS = ("router-a", "router-b", "router-c", "router-d")
GROUP = "worker-0"
REPLICAS = 4
MAX_RUNNING = 32
# Requests come in waves of twenty, together more than one replica can seat.
WAVES, WAVE_S = 15, 0.15


class Site:
    """The mesh, and clients of each router."""

    def __init__(self, mesh: FaultyMesh, said: Said) -> None:
        self.mesh = mesh
        self.said = said
        self.stubs: dict[str, RouterServiceStub] = {}
        self._seed = 0

    def prompts(self, count: int, size: int = 64) -> list[list[int]]:
        """Prompts that nobody ever sent."""
        self._seed += 1
        return self.said.distinct(self._seed, count, size)

    def traffic(self, tokens: int) -> Traffic:
        return Traffic(self.said, tokens=tokens, timeout_s=60)

    async def served(self) -> Counter[int]:
        """How many requests each replica has ended."""
        port = self.mesh.ports[f"{GROUP}-metrics"]
        name = "radixmesh_worker_requests_total"
        return Counter(
            {rank: int(await sample(port, name, dp_rank=str(rank))) for rank in range(REPLICAS)}
        )

    async def replicas(self, router: str) -> list[Replica]:
        async with self.mesh.fleet(router) as fleet:
            return await fleet.list_replicas()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Site, None]:
    shape = Shape(
        dps=(REPLICAS,),
        routers=ROUTERS,
        worker_flags=(
            *("--fake-decode-ms=30", "--fake-prefill-tokens-per-s=4000"),
            *(f"--max-running={MAX_RUNNING}", "--fake-kv-blocks=16384", "--max-failures=0"),
            # A rank that stands still is not given up as long as a test lasts.
            *("--probe-timeout-s=60", "--step-timeout-s=60"),
        ),
    )
    mesh = FaultyMesh(model_dir, tmp_path_factory.mktemp("routers"), shape)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(mesh.running())
        site = Site(mesh, Said(model_dir))
        for router in ROUTERS:
            site.stubs[router] = await stack.enter_async_context(stub_of(mesh.address(router)))
        yield site


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def at_rest(site: Site) -> AsyncGenerator[None, None]:
    """Every test begins and ends with nothing held and all views proven."""
    await until_nothing_is_held(site.mesh, 20)
    yield
    await until_nothing_is_held(site.mesh, 20)


async def place_of(site: Site, router: str, prompt: list[int]) -> int:
    """Send a prompt alone; return the replica that it ran at."""
    traffic = site.traffic(tokens=2)
    traffic.start(site.stubs[router], [Stream(prompt)])
    await traffic.until_all_ended()
    traffic.check()
    return traffic.streams[0].finishes[0].receipt.dp_rank


async def test_a_router_that_dies_leaves_what_it_warmed_to_the_others(site: Site) -> None:
    prompts = site.prompts(40, 160)
    homes = [await place_of(site, "router-a", prompt) for prompt in prompts]
    assert len(set(homes)) == REPLICAS
    await until_nothing_is_held(site.mesh, 5)  # so router B has seen all of it
    await site.mesh.services["router-a"].kill()
    try:
        repeats = [await place_of(site, "router-b", prompt) for prompt in prompts]
    finally:
        await site.mesh.services["router-a"].start()
    same = sum(home == repeat for home, repeat in zip(homes, repeats, strict=True))
    assert same >= 0.9 * len(prompts)


async def test_a_router_that_dies_takes_its_load_along_and_no_other(site: Site) -> None:
    # Nothing of A's would end by itself in time.
    a, b = site.traffic(tokens=2_000), site.traffic(tokens=60)
    a.start(site.stubs["router-a"], [Stream(prompt) for prompt in site.prompts(24)])
    b.start(site.stubs["router-b"], [Stream(prompt) for prompt in site.prompts(16)])
    await a.until(lambda: a.midway == 24)
    await b.until(lambda: b.midway == 16)
    await site.mesh.until_fleet("router-b", lambda replicas: running(replicas) == 40, 5)
    await site.mesh.services["router-a"].kill()
    try:
        # One report, which comes once a second at the latest.
        await site.mesh.until_fleet("router-b", lambda replicas: running(replicas) <= 16, 2)
        replicas = await site.replicas("router-b")
        assert sum(one.in_flight_count for one in replicas) == 16 - b.ended
        await b.until_all_ended()
        b.check()
        await a.until_all_ended()
        a.check(lambda stream: stream.error is not None and len(stream.ids) > 0)
    finally:
        await site.mesh.services["router-a"].start()


def running(replicas: Sequence[Replica]) -> int:
    return sum(one.running_count + one.waiting_count for one in replicas)


async def over_grpc(site: Site, router: str, prompts: list[list[int]], tokens: int) -> None:
    traffic = site.traffic(tokens)
    traffic.start(site.stubs[router], [Stream(prompt) for prompt in prompts])
    await traffic.until_all_ended()
    traffic.check()


async def over_http(site: Site, router: str, prompts: list[list[int]], tokens: int) -> None:
    base = f"http://{LOOPBACK}:{site.mesh.ports[f'{router}-http']}"
    unlimited = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base, limits=unlimited, timeout=60) as calls:
        asked = [
            calls.post("/v1/completions", json={"prompt": prompt, "max_tokens": tokens})
            for prompt in prompts
        ]
        for prompt, answer in zip(prompts, await asyncio.gather(*asked), strict=True):
            text = site.said.text(site.said.ids(prompt, tokens))
            assert answer.json()["choices"][0]["text"] == text


Send = Callable[[Site, str, list[list[int]], int], Awaitable[None]]


@pytest.mark.parametrize("send", [over_grpc, over_http])
async def test_four_routers_load_four_replicas_evenly(site: Site, send: Send) -> None:
    before = await site.served()
    prompts = site.prompts(100)
    await asyncio.gather(
        *(send(site, router, prompts[at::4], 40) for at, router in enumerate(ROUTERS))
    )
    shares = (await site.served()) - before
    assert shares.total() == len(prompts)
    assert max(shares.values()) <= 1.3 * min(shares.values()), shares


async def test_a_burst_is_spread_before_any_report_knows_of_it(site: Site) -> None:
    before = await site.served()
    await over_grpc(site, "router-a", site.prompts(64, 240), 10)
    shares = (await site.served()) - before
    assert shares.total() == 64
    assert even(shares), shares


async def test_requests_that_only_prefill_are_spread_evenly(site: Site) -> None:
    before = await site.served()
    await over_grpc(site, "router-b", site.prompts(32, 480), 1)
    shares = (await site.served()) - before
    assert shares.total() == 32
    assert even(shares), shares


def even(shares: Counter[int]) -> bool:
    """Whether every replica has its part, or one more or less."""
    return all(abs(share - shares.total() / REPLICAS) <= 1 for share in shares.values())


async def test_a_prompt_that_nobody_knows_never_goes_to_a_replica_that_stands_still(
    site: Site,
) -> None:
    """The one that stands still has the smallest cache, which makes it no better."""
    front = site.mesh.services[GROUP]
    for router in ROUTERS:
        await over_grpc(site, router, site.prompts(20, 320), 1)
    front.ranks()[0].kill()
    await site.mesh.until_fleet("router-a", lambda replicas: not site.mesh.whole(replicas), 5)
    await site.mesh.until_exact()
    empty = min(await site.replicas("router-a"), key=lambda one: one.cached_block_count)
    assert empty.cached_block_count == 0
    traffic = site.traffic(tokens=1)
    rank = front.ranks()[-1]  # the youngest: the one that was just started
    rank.suspend()
    before = await routed_to(site, empty.dp_rank)
    try:
        for at, prompt in enumerate(site.prompts(80)):
            traffic.start(site.stubs[ROUTERS[at % 4]], [Stream(prompt)])
            # One after the other, but for those that are stuck.
            await traffic.until(lambda: len(traffic.streams) - traffic.ended <= len(ROUTERS))
        sent = (await routed_to(site, empty.dp_rank)) - before
    finally:
        rank.resume()
    await traffic.until_all_ended()
    traffic.check()
    # A router learns it by one of its own twenty requests, or by two that came together.
    assert all(count <= 2 for count in sent.values())
    assert sent.total() <= 6


async def routed_to(site: Site, dp_rank: int) -> Counter[str]:
    """How many requests each router has sent to a replica."""
    routed: Counter[str] = Counter()
    for router in ROUTERS:
        for one in await site.replicas(router):
            routed[router] += one.routed_count if one.dp_rank == dp_rank else 0
    return routed


async def test_a_prefix_that_most_ask_for_is_held_by_several_replicas(site: Site) -> None:
    """One replica holds it at first; it could not seat all who come, so others compute it, too."""
    (hot,) = site.prompts(1, 800)
    await place_of(site, "router-a", hot)
    await until_nothing_is_held(site.mesh, 5)  # so all routers know the one that holds it
    hot_blocks = 800 // 16
    assert len(await holders(site, hot, hot_blocks)) == 1
    before = await site.served()
    traffic = site.traffic(tokens=20)
    for _ in range(WAVES):
        prompts = [[*hot, *tail] for tail in site.prompts(16, 16)] + site.prompts(4, 816)
        for at, prompt in enumerate(prompts):
            traffic.start(site.stubs[ROUTERS[at % 4]], [Stream(prompt)])
        await asyncio.sleep(WAVE_S)  # the load that is offered; nothing waits for it
    await traffic.until_all_ended()
    traffic.check()
    shares = (await site.served()) - before
    assert len(await holders(site, hot, hot_blocks)) >= 2
    assert max(shares.values()) <= 0.7 * shares.total(), shares


async def holders(site: Site, prompt: list[int], blocks: int) -> list[int]:
    """The replicas that hold so many blocks of a prompt."""
    async with site.mesh.fleet("router-a") as fleet:
        explained = await fleet.explain_route([*prompt, *prompt[:16]])
    return [one.dp_rank for one in explained.candidates if one.matched_blocks >= blocks]
