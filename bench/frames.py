"""What does a replica cost a router: load reports and steps? One command.

    python -m bench.frames [--replicas 64] [--seconds 8] [--tokens 150] [--repeat 3] [--json OUT]

Puts a real router process before fake groups of one replica each, and takes the CPU time
of the router, user and system, while

1. they are idle: a load report and a proof of the cache once a second;
2. they are busy: a load report every 50 ms, the most that a front sends;
3. as many streams as there are replicas run on one of them, so that a step frame has a
   row for each of them, and then one on each, so that it has one row. Tokens and clients
   are the same both times: the difference is frames.

A load frame's figure is the difference of 2 and 1, by frames; a step frame's that of 3.
Then it says what many routers before many replicas would use. Medians of the repeats.
"""

import argparse
import asyncio
import json
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from bench.cpu import running
from radixmesh.cli.mesh import Mesh
from radixmesh.models import resolve, tokenizer_fingerprint

IDLE_S, BUSY_S = 1.0, 0.05
SETTLE_S = 2.0
START_S = 60.0
# What is laid out at the end: routers, replicas, steps a second of a busy replica.
FLEETS = ((1, 64), (4, 64), (4, 256), (16, 1000))
STEPS_PER_S = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One stretch of time: frames that came, and CPU seconds that the router used."""

    seconds: float
    cpu_s: float
    loads: int
    steps: int
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians. Percent of one core for each replica, microseconds for each frame or row."""

    idle_percent: float
    busy_percent: float
    load_us: float
    step_us: float
    row_us: float


class Site:
    """A router, the groups behind it, and what both say."""

    def __init__(self, router: Process, groups: Process, grpc: int) -> None:
        self._router = psutil.Process(router.pid)
        self._groups = groups
        self.grpc = f"127.0.0.1:{grpc}"

    async def sent(self) -> dict[str, int]:
        """Return how many frames the groups have sent."""
        stdin, stdout = self._groups.stdin, self._groups.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(b"\n")
        counts: dict[str, int] = json.loads(await stdout.readline())
        return counts

    def cpu_s(self) -> float:
        """Return what the router has used since its start."""
        times = self._router.cpu_times()
        return float(times.user + times.system)

    @asynccontextmanager
    async def sampling(self) -> AsyncGenerator[list[Sample]]:
        """Measure the time of the context; the sample is in the list afterwards."""
        found: list[Sample] = []
        clock = asyncio.get_running_loop().time
        before, cpu_s, began = await self.sent(), self.cpu_s(), clock()
        yield found
        seconds, used = clock() - began, self.cpu_s() - cpu_s
        after = await self.sent()
        counts = {kind: after[kind] - before[kind] for kind in after}
        found.append(Sample(seconds=seconds, cpu_s=used, **counts))


@asynccontextmanager
async def process(*argv: str, errors: int | None = None) -> AsyncGenerator[Process]:
    """Run a Python module for the time of the context."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *argv, stdin=PIPE, stdout=PIPE, stderr=errors
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


@asynccontextmanager
async def site(
    mesh: Mesh, replicas: int, interval_s: float, step_ms: float
) -> AsyncGenerator[Site]:
    """Run groups and a router of their own before a mesh's text services; ready when entered."""
    model_dir = resolve(mesh.settings.model)
    async with AsyncExitStack() as stack:
        groups = await stack.enter_async_context(
            process(
                *("bench.groups", str(replicas), f"--interval={interval_s}"),
                *(f"--step-ms={step_ms}", f"--model={mesh.describe()['model']}"),
                f"--fingerprint={tokenizer_fingerprint(model_dir)}",
            )
        )
        assert groups.stdout is not None
        addresses = json.loads(await groups.stdout.readline())
        router = await stack.enter_async_context(
            process(
                *("router", "--port=0", "--http-port=0", "--fleet-port=0", "--log-json"),
                *("--policy=round_robin", f"--groups={','.join(addresses)}"),
                f"--tokenizers={mesh.address('tokenizer')}",
                f"--detokenizers={mesh.address('detokenizer')}",
                errors=PIPE,
            )
        )
        ports = await asyncio.wait_for(_ports(router), START_S)
        draining = asyncio.ensure_future(_drain(router))
        stack.callback(draining.cancel)
        await asyncio.wait_for(_ready(ports["http"], replicas), START_S)
        await asyncio.sleep(SETTLE_S)
        yield Site(router, groups, ports["grpc"])


async def _ports(router: Process) -> dict[str, int]:
    assert router.stderr is not None
    async for line in router.stderr:
        said = json.loads(line)
        if said["event"] == "serving":
            return {name: int(said[name]) for name in ("grpc", "http")}
    raise SystemExit("the router did not start")


async def _drain(router: Process) -> None:
    assert router.stderr is not None
    async for _ in router.stderr:
        pass


async def _ready(port: int, replicas: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False) as http:
        while True:
            models = (await http.get("/v1/models")).json()["data"]
            if sum(model["ready_replicas"] for model in models) == replicas:
                return
            await asyncio.sleep(0.1)


async def rest(mesh: Mesh, interval_s: float, options: argparse.Namespace) -> Sample:
    """Measure groups that only report."""
    async with site(mesh, options.replicas, interval_s, 20.0) as at:
        async with at.sampling() as found:
            await asyncio.sleep(options.seconds)
        return found[0]


async def work(mesh: Mesh, replicas: int, options: argparse.Namespace) -> Sample:
    """Measure streams, `options.replicas` of them whatever the number of replicas."""
    async with site(mesh, replicas, IDLE_S, options.step_ms) as at:
        await _stream(at, options.replicas, 2)  # imports and caches
        async with at.sampling() as found:
            tokens = await _stream(at, options.replicas, options.tokens)
        return Sample(**{**asdict(found[0]), "tokens": tokens})


async def _stream(at: Site, streams: int, tokens: int) -> int:
    async with process(
        *("bench.streams", at.grpc, f"--streams={streams}", f"--tokens={tokens}")
    ) as client:
        printed, _ = await client.communicate()
    return int(json.loads(printed)["tokens"])


async def measure(mesh: Mesh, options: argparse.Namespace) -> Figures:
    """Measure everything once."""
    idle, busy = await rest(mesh, IDLE_S, options), await rest(mesh, BUSY_S, options)
    one, many = await work(mesh, 1, options), await work(mesh, options.replicas, options)
    idle_s, busy_s = idle.cpu_s / idle.seconds, busy.cpu_s / busy.seconds
    more_loads = busy.loads / busy.seconds - idle.loads / idle.seconds
    # Reports of replicas that did not report in the run on one of them.
    reports_s = idle_s * many.seconds - idle_s / options.replicas * one.seconds
    step_s = (many.cpu_s - one.cpu_s - reports_s) / (many.steps - one.steps)
    return Figures(
        idle_percent=100 * idle_s / options.replicas,
        busy_percent=100 * busy_s / options.replicas,
        load_us=1e6 * (busy_s - idle_s) / more_loads,
        step_us=1e6 * step_s,
        row_us=1e6 * (one.cpu_s - step_s * one.steps) / one.tokens,
    )


def median(many: Sequence[Figures]) -> Figures:
    """Return the median of each figure."""
    names = Figures.__dataclass_fields__
    return Figures(**{n: statistics.median(getattr(one, n) for one in many) for n in names})


def show(figures: Figures) -> None:
    """Print the figures, and what they mean for fleets."""
    print(f"idle replica (report and proof each second)  {figures.idle_percent:8.3f} % of a core")
    print(f"busy replica (a report every 50 ms)          {figures.busy_percent:8.3f} % of a core")
    print(f"load frame                                   {figures.load_us:8.1f} us")
    print(f"step frame                                   {figures.step_us:8.1f} us")
    print(f"row of a step, to the client and its start   {figures.row_us:8.1f} us")
    print("\ncores of all routers together: every router hears each replica's load; busy ones")
    print(f"do {STEPS_PER_S:g} steps a second, with outputs of every router in each at worst")
    print(f"{'routers':>8}{'replicas':>10}{'idle':>8}{'busy, loads':>13}{'busy, steps':>13}")
    for routers, replicas in FLEETS:
        idle = routers * replicas * figures.idle_percent / 100
        loads = routers * replicas * figures.busy_percent / 100
        # At worst a step has outputs of every router, and so a frame for each.
        steps = routers * replicas * STEPS_PER_S * figures.step_us / 1e6
        print(f"{routers:8}{replicas:10}{idle:8.2f}{loads:13.2f}{steps:13.2f}")


async def run(options: argparse.Namespace) -> Figures:
    """Measure everything, again and again."""
    async with running(options.model, "fake", "--groups=1") as mesh:
        return median([await measure(mesh, options) for _ in range(options.repeat)])


def main() -> None:
    """Measure and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="only its tokenizer is used")
    parser.add_argument("--replicas", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--tokens", type=int, default=150, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    figures = asyncio.run(run(options))
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(asdict(figures), indent=2) + "\n")


if __name__ == "__main__":
    main()
