"""A whole mesh in this process: the real router and text services, fake workers, real channels.

Every service is behind a proxy that can cut or freeze its connections. The router
is only looked at from outside: its gRPC API, FleetService and metrics page.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from radixmesh.errors import MeshError
from radixmesh.models import tokenizer_fingerprint
from radixmesh.router.v1 import fleet_service_pb2, fleet_service_pb2_grpc
from radixmesh.router.v1 import router_service_pb2 as pb
from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceStub
from radixmesh.rpc.status import from_rpc_error
from router.app import Ports, serve
from router.settings import RouterSettings
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.tcp_proxy import TcpProxy, proxy_to
from tests.fakes.worker import FAST, FakeWorker
from tokenizer_svc.app import serve_detokenizer, serve_tokenizer
from tokenizer_svc.settings import DetokenizerSettings, TokenizerSettings

LOOPBACK = "127.0.0.1"


@dataclass
class Got:
    """What a client received of one request."""

    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[pb.TokenLogprob] = field(default_factory=list)
    finishes: dict[int, pb.Finish] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return self.texts.get(0, "")

    def add(self, message: pb.GenerateResponse) -> None:
        if message.HasField("finish"):
            assert message.finish.choice not in self.finishes
            self.finishes[message.finish.choice] = message.finish
            return
        delta = message.delta
        assert delta.choice not in self.finishes, "nothing follows a finish"
        self.texts[delta.choice] = self.texts.get(delta.choice, "") + delta.text
        self.ids.setdefault(delta.choice, []).extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)


class Text:
    """What the model says, and what it looks like as text."""

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._ordinary = ordinary_ids(model_dir)

    def prompt_ids(self, prompt: str) -> list[int]:
        return list(self._tokenizer.encode(prompt).ids)

    def output_ids(self, prompt: str, count: int) -> list[int]:
        return oracle_output(self.prompt_ids(prompt), self._ordinary, count)

    def output(self, prompt: str, count: int) -> str:
        return str(self._tokenizer.decode(self.output_ids(prompt, count)))


class RouterMesh:
    """The mesh. Lists hold one proxy for each service process."""

    def __init__(self, model_dir: Path, ports: Ports, stop: asyncio.Event) -> None:
        self.text = Text(model_dir)
        self.ports = ports
        self.stop = stop
        self.workers: list[FakeWorker] = []
        self.worker_proxies: list[TcpProxy] = []
        self.tokenizers: list[TcpProxy] = []
        self.detokenizers: list[TcpProxy] = []
        self.router: asyncio.Task[None] | None = None
        self._channel = grpc.aio.insecure_channel(f"{LOOPBACK}:{ports.grpc}")
        self._admin = grpc.aio.insecure_channel(f"{LOOPBACK}:{ports.fleet}")
        # One for all: to make one takes so long that links could miss a heartbeat.
        self._http = httpx.AsyncClient(verify=False)
        self.stub = RouterServiceStub(self._channel)
        self.fleet = fleet_service_pb2_grpc.FleetServiceStub(self._admin)

    async def close(self) -> None:
        await self._channel.close()
        await self._admin.close()
        await self._http.aclose()

    @property
    def running(self) -> int:
        """Outputs that workers have."""
        return sum(worker.running for worker in self.workers)

    async def generate(
        self,
        prompt: str,
        count: int = 16,
        *,
        timeout_s: float = 15.0,
        watch: Callable[[Got], None] = lambda _: None,
        metadata: tuple[tuple[str, str], ...] = (),
        **fields: Any,
    ) -> Got:
        """Run a request; `watch` sees what came so far after each message.

        Raises:
            MeshError: The request ended by it.
        """
        request = pb.GenerateRequest(text=prompt, **fields)
        if not request.sampling.HasField("max_tokens"):
            request.sampling.max_tokens = count
        got = Got()
        call = self.stub.Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            async for message in call:
                got.add(message)
                watch(got)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()
        return got

    async def metrics(self) -> dict[str, float]:
        """The router's gauges and counters, each summed over its labels."""
        page = await self._http.get(f"http://{LOOPBACK}:{self.ports.http}/metrics")
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(page.text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def held(self) -> dict[str, float]:
        """Everything that must be zero when nothing runs; only what is not."""
        metrics = await self.metrics()
        replicas = await self.fleet.ListReplicas(fleet_service_pb2.ListReplicasRequest())
        counts = {
            "in flight": metrics["radixmesh_router_requests_in_flight_count"],
            "queued": metrics["radixmesh_router_requests_queued_count"],
            "booked": sum(replica.in_flight_count for replica in replicas.replicas),
            "at workers": self.running,
        }
        entries = metrics["radixmesh_router_link_entries_count"]
        return {name: count for name, count in {**counts, "entries": entries}.items() if count}

    async def until_cached(self, group_id: str, blocks: int) -> None:
        """Return when the feed has told the router that a group's caches hold so many blocks."""
        watching = self.fleet.WatchFleet(fleet_service_pb2.WatchFleetRequest(), timeout=5)
        async for said in watching:
            of_group = [one for one in said.replicas if one.group_id == group_id]
            if sum(one.cached_block_count for one in of_group) >= blocks:
                break
        watching.cancel()

    async def until_nothing_is_held(self, timeout_s: float = 2.0) -> None:
        """Return when all counters are zero.

        Raises:
            AssertionError: Some are not, in time.
        """
        held: dict[str, float] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    held = await self.held()
                    if not held:
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"still held: {held}") from None


async def eventually(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Return when the condition holds; services run meanwhile."""
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


@asynccontextmanager
async def run_mesh(
    model_dir: Path,
    *,
    workers: int = 2,
    tokenizers: int = 1,
    detokenizers: int = 1,
    extra_groups: tuple[str, ...] = (),
    extra_tokenizers: tuple[str, ...] = (),
    extra_detokenizers: tuple[str, ...] = (),
    text_metrics: Sequence[int] = (0, 0),
    shape: dict[str, Any] | None = None,
    **flags: Any,
) -> AsyncGenerator[RouterMesh]:
    """Run a mesh until the block's end; ready when it is entered.

    Args:
        model_dir: With a tokenizer.
        workers: Fake worker groups.
        tokenizers: Services.
        detokenizers: Services.
        extra_groups: Addresses of groups that are not ours.
        extra_tokenizers, extra_detokenizers: The same of services.
        text_metrics: Ports for the metrics pages of tokenizer and detokenizer; 0: none.
        shape: Of the fake workers, `FakeShape`.
        flags: Of the router.
    """
    async with AsyncExitStack() as stack:
        fakes = [
            await stack.enter_async_context(
                FakeWorker(
                    fingerprint=tokenizer_fingerprint(model_dir),
                    ordinary=ordinary_ids(model_dir),
                    **{"step_s": 0.002, **(shape or {})},
                )
            )
            for _ in range(workers)
        ]
        behind = [await stack.enter_async_context(proxy_to(fake.port)) for fake in fakes]
        encoding = [
            await stack.enter_async_context(_text_service(_tokenizer, model_dir, text_metrics[0]))
            for _ in range(tokenizers)
        ]
        decoding = [
            await stack.enter_async_context(_text_service(_detokenizer, model_dir, text_metrics[1]))
            for _ in range(detokenizers)
        ]
        settings = RouterSettings(
            groups=[
                *(f"g{index}={LOOPBACK}:{proxy.port}" for index, proxy in enumerate(behind)),
                *extra_groups,
            ],
            tokenizers=[f"{LOOPBACK}:{proxy.port}" for proxy in encoding] + list(extra_tokenizers),
            detokenizers=[f"{LOOPBACK}:{proxy.port}" for proxy in decoding]
            + list(extra_detokenizers),
            **{
                "port": 0,
                "http_port": 0,
                "fleet_port": 0,
                "settle_s": 0,
                "drain_grace_s": 5,
                "stream_interval_ms": 0,
                **flags,
            },
        )
        stop = asyncio.Event()
        listening: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
        router = asyncio.create_task(
            serve(settings, stop, on_listening=listening.set_result, limits=FAST)
        )
        stack.push_async_callback(_end, router, stop)
        mesh = RouterMesh(model_dir, await listening, stop)
        stack.push_async_callback(mesh.close)
        mesh.router = router
        mesh.workers, mesh.worker_proxies = fakes, behind
        mesh.tokenizers, mesh.detokenizers = encoding, decoding
        await _ready(mesh, workers)
        yield mesh


async def _ready(mesh: RouterMesh, replicas: int) -> None:
    async with asyncio.timeout(10):
        while True:
            try:
                metrics = await mesh.metrics()
                models = await mesh.stub.ListModels(pb.ListModelsRequest())
            except (MeshError, httpx.HTTPError):
                continue
            ready = sum(model.ready_replica_count for model in models.models)
            links = metrics.get("radixmesh_router_links_up_count", 0)
            texts = len(mesh.tokenizers) + len(mesh.detokenizers)
            if ready >= replicas and links >= texts + replicas:
                return
            await asyncio.sleep(0.02)


async def _end(router: asyncio.Task[None], stop: asyncio.Event) -> None:
    stop.set()
    async with asyncio.timeout(10):
        await router


Run = Callable[[dict[str, Any], asyncio.Event, Callable[[int], None]], Coroutine[Any, Any, None]]


@asynccontextmanager
async def _text_service(run: Run, model_dir: Path, metrics: int) -> AsyncGenerator[TcpProxy]:
    stop = asyncio.Event()
    flags = {"model": str(model_dir), "model_name": "tiny", "port": 0, "metrics_port": metrics}
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    service = asyncio.create_task(run(flags, stop, port.set_result))
    try:
        async with proxy_to(await port) as proxy:
            yield proxy
    finally:
        await _end(service, stop)


async def _tokenizer(
    flags: dict[str, Any], stop: asyncio.Event, on_ready: Callable[[int], None]
) -> None:
    await serve_tokenizer(TokenizerSettings(**flags), stop, on_ready=on_ready)


async def _detokenizer(
    flags: dict[str, Any], stop: asyncio.Event, on_ready: Callable[[int], None]
) -> None:
    await serve_detokenizer(DetokenizerSettings(**flags), stop, on_ready=on_ready)
