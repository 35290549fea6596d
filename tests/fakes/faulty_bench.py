"""The mesh of the fault matrix, and what stands in its ways to be broken.

Two routers and three groups. The first router reaches one group through a proxy that can spoil
the feed, another one through a proxy that can cut the link; one client reaches that router
through a proxy that can freeze.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceStub
from tests.fakes.faulty_feed import FeedProxy, feed_proxy_to
from tests.fakes.faulty_mesh import LOOPBACK, FaultyMesh, Shape
from tests.fakes.faulty_rest import Footprints, sample
from tests.fakes.faulty_streams import Said, stub_of
from tests.fakes.tcp_proxy import TcpProxy, proxy_to

A, B = "router-a", "router-b"
# Not a router, but a connection to the first one that can be frozen.
SLOW = "slow"
DIRECT, SPOILT, PROXIED = "worker-0", "worker-1", "worker-2"
SHAPE = Shape(
    dps=(2, 1, 1),
    routers=(A, B),
    worker_flags=(
        *("--fake-decode-ms=20", "--fake-prefill-tokens-per-s=40000"),
        *("--fake-kv-blocks=16384", "--max-running=512"),
        *("--max-waiting=4096", "--max-failures=0"),
        # Stuck ranks are given up soon; the times of a busy machine still fit in.
        *("--probe-interval-s=0.5", "--probe-timeout-s=3", "--step-timeout-s=4"),
    ),
    # One router has patience, the other has none.
    flags_of={A: ("--ready-wait-s=30",), B: ("--ready-wait-s=2", "--resume-wait-s=2")},
)


class Bench:
    """The mesh, its proxies and its clients.

    Attributes:
        feed: Between router A and the group SPOILT.
        link: Between router A and the group PROXIED.
        reader: Between the client SLOW and router A.
        stubs: Clients by name: A, B and SLOW.
        footprints: How large processes were.
    """

    def __init__(
        self, mesh: FaultyMesh, said: Said, feed: FeedProxy, link: TcpProxy, reader: TcpProxy
    ) -> None:
        self.mesh = mesh
        self.said = said
        self.feed = feed
        self.link = link
        self.reader = reader
        self.stubs: dict[str, RouterServiceStub] = {}
        self.footprints = Footprints()

    async def metric(self, router: str, name: str, **labels: str) -> float:
        """What a router's page says: the sum of the series with these labels."""
        port = self.mesh.ports[f"{router}-metrics"]
        return await sample(port, f"radixmesh_router_{name}", **labels)


@asynccontextmanager
async def running_bench(model: Path, folder: Path) -> AsyncGenerator[Bench, None]:
    """Run it all."""
    mesh = FaultyMesh(model, folder, SHAPE)
    async with AsyncExitStack() as stack:
        feed = await stack.enter_async_context(feed_proxy_to(mesh.address(SPOILT)))
        link = await stack.enter_async_context(proxy_to(mesh.ports[PROXIED]))
        reader = await stack.enter_async_context(proxy_to(mesh.ports[A]))
        mesh.ways[A, SPOILT] = f"{LOOPBACK}:{feed.port}"
        mesh.ways[A, PROXIED] = f"{LOOPBACK}:{link.port}"
        await stack.enter_async_context(mesh.running())
        bench = Bench(mesh, Said(model), feed, link, reader)
        addresses = {A: mesh.address(A), B: mesh.address(B), SLOW: f"{LOOPBACK}:{reader.port}"}
        for name, address in addresses.items():
            bench.stubs[name] = await stack.enter_async_context(stub_of(address))
        yield bench
