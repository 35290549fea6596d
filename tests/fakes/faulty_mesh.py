"""A mesh of real processes that a test may kill, stop and start again, one by one.

Unlike `up`, nothing is restarted behind the test's back: what it breaks it mends. Knows
processes and ports; not what runs through them.
"""

import asyncio
import random
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from radixmesh.client import AsyncFleetClient, Phase, Replica, View
from radixmesh.errors import MeshError
from radixmesh.settings import child_environment

LOOPBACK = "127.0.0.1"
START_S = 60.0
POLL_S = 0.05


def free_ports(count: int) -> list[int]:
    """Ports that are free now, below those that the kernel gives to connections.

    What is started anew thus finds its port again.
    """
    found = []
    for port in random.sample(range(10_000, 32_000), 2_000):
        with suppress(OSError):
            socket.create_server((LOOPBACK, port)).close()
            found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free ports")


class Service:
    """One process, started as often as wanted, with the same command line."""

    def __init__(self, name: str, module: str, *flags: str, log: Path) -> None:
        self.name = name
        self._argv = (sys.executable, "-m", module, *flags)
        self._log = log
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it; what came before must have ended."""
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv, stdout=log, stderr=log, env=child_environment()
            )

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """Kill it, and wait until it and all that it started are gone."""
        process, self._process = self._process, None
        if process is None:
            return
        children: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        _, left = await asyncio.to_thread(psutil.wait_procs, children, timeout=10)
        assert not left, f"{self.name} left processes behind: {left}"

    @property
    def last_words(self) -> str:
        """The end of its log, when it has ended by itself; else empty."""
        process = self._process
        if process is None or process.returncode is None:
            return ""
        return f"{self.name} ended with {process.returncode}:\n{self._log.read_text()[-2000:]}"

    def tree(self) -> list[psutil.Process]:
        """It and all that it started."""
        if self._process is None:
            return []
        me = psutil.Process(self.pid)
        return [me, *me.children(recursive=True)]

    def ranks(self) -> list[psutil.Process]:
        """The ranks of a front, in the order in which they were started."""
        found = [one for one in self.tree() if "radixmesh-worker rank" in " ".join(one.cmdline())]
        return sorted(found, key=lambda one: one.create_time())


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the mesh is made of.

    Attributes:
        dps: Replicas of each group; the groups are `worker-0`, `worker-1`, ...
        routers: Names of routers.
        worker_flags, router_flags: Of all of them.
        flags_of: More flags, by the name of a process.
    """

    dps: Sequence[int] = (2, 1, 1)
    routers: Sequence[str] = ("router-a",)
    worker_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    flags_of: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def groups(self) -> dict[str, int]:
        """Replicas of each group, by its name."""
        return {f"worker-{number}": dp for number, dp in enumerate(self.dps)}

    @property
    def places(self) -> list[tuple[str, int]]:
        """Every replica: its group, and which one of it."""
        return [(group, dp_rank) for group, dp in self.groups.items() for dp_rank in range(dp)]


class FaultyMesh:
    """The mesh. Ports are taken at once, so that proxies can be put between before it runs.

    Attributes:
        ports: Of each process; of a router its gRPC port.
        services: The processes, by name.
        ways: How a router reaches a group, where that is not directly.
    """

    def __init__(self, model: Path, folder: Path, shape: Shape) -> None:
        self.shape = shape
        self.ways: dict[tuple[str, str], str] = {}
        self.services: dict[str, Service] = {}
        self._model = model
        self._folder = folder
        names = ["tokenizer", "detokenizer", *shape.groups]
        names += [f"{name}-metrics" for name in names]
        for router in shape.routers:
            names += [router, *(f"{router}-{part}" for part in ("metrics", "fleet", "http"))]
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))

    def address(self, name: str) -> str:
        return f"{LOOPBACK}:{self.ports[name]}"

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Run all processes; every router has an exact view of every replica on entry."""
        for name in ("tokenizer", "detokenizer"):
            self._add(name, "tokenizer_svc", name, *self._leaf_flags(name))
        for name, dp in self.shape.groups.items():
            flags = ("--engine=fake", f"--dp={dp}", *self.shape.worker_flags)
            self._add(name, "worker", *self._leaf_flags(name), *flags)
        for name in self.shape.routers:
            self._add(name, "router", *self._router_flags(name))
        try:
            await asyncio.gather(*(service.start() for service in self.services.values()))
            await self.until_exact()
            yield
        finally:
            await asyncio.gather(*(service.kill() for service in self.services.values()))

    def _add(self, name: str, module: str, *flags: str) -> None:
        flags = (*flags, *self.shape.flags_of.get(name, ()))
        self.services[name] = Service(name, module, *flags, log=self._folder / f"{name}.log")

    def _leaf_flags(self, name: str) -> tuple[str, ...]:
        return (
            *(f"--model={self._model}", "--model-name=tiny", f"--port={self.ports[name]}"),
            f"--metrics-port={self.ports[f'{name}-metrics']}",
        )

    def _router_flags(self, name: str) -> tuple[str, ...]:
        groups = [
            f"{group}={self.ways.get((name, group), self.address(group))}"
            for group in self.shape.groups
        ]
        return (
            *(f"--groups={','.join(groups)}", f"--tokenizers={self.address('tokenizer')}"),
            *(f"--detokenizers={self.address('detokenizer')}", f"--port={self.ports[name]}"),
            *(f"--{part}-port={self.ports[f'{name}-{part}']}" for part in ("metrics", "fleet")),
            f"--http-port={self.ports[f'{name}-http']}",
            *self.shape.router_flags,
        )

    def check(self) -> None:
        """Nobody has ended by himself."""
        ended = [service.last_words for service in self.services.values() if service.last_words]
        assert not ended, "\n".join(ended)

    def fleet(self, router: str) -> AsyncFleetClient:
        """A client of a router's FleetService."""
        return AsyncFleetClient(self.address(f"{router}-fleet"))

    async def until_exact(self) -> None:
        """Wait until every router gives requests to every replica, and knows its cache."""
        for router in self.shape.routers:
            await self.until_fleet(router, self.whole)

    def whole(self, replicas: Sequence[Replica]) -> bool:
        """Whether a router's list is that of an unharmed mesh."""
        return len(replicas) == sum(self.shape.dps) and all(
            one.phase is Phase.READY and one.view is View.EXACT for one in replicas
        )

    async def left_out(self) -> dict[str, str]:
        """Why routers give nothing new to replicas that are ready."""
        reasons = {}
        for router in self.shape.routers:
            async with self.fleet(router) as fleet:
                for one in await fleet.list_replicas():
                    if one.reason:
                        reasons[f"{router} {one.group_id}/{one.dp_rank}"] = one.reason
        return reasons

    async def until_fleet(
        self, router: str, ready: Callable[[Sequence[Replica]], bool], within_s: float = START_S
    ) -> None:
        """Wait until a router's list of replicas is as wanted."""
        seen: object = "no answer"
        try:
            async with asyncio.timeout(within_s), self.fleet(router) as fleet:
                while True:
                    with suppress(MeshError):
                        seen = replicas = await fleet.list_replicas()
                        if ready(replicas):
                            return
                    self.check()
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"{router} after {within_s} s: {seen}") from None
