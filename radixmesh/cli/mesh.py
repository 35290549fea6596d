"""A local mesh: its processes started, watched until a request is served, ended. No terminal here.

Speaks only HTTP to the router, so that the process that forks the others holds no gRPC.
"""

import asyncio
import json
import os
import random
import socket
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixmesh.cli.plan import Service, UpSettings, model_name, plan
from radixmesh.cli.processes import Child, Say, ServiceFailed
from radixmesh.errors import InvalidRequest
from radixmesh.models import converted_dir, find_gguf, is_model_dir, resolve

__all__ = ["Mesh", "find_port_base", "local_mesh"]

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh that serves; `children` are its processes by name."""

    settings: UpSettings
    services: Sequence[Service]
    children: dict[str, Child]

    @property
    def ports(self) -> dict[str, int]:
        """All ports by name: http, grpc, metrics, fleet, tokenizer, worker-0, ..."""
        return {name: port for service in self.services for name, port in service.ports.items()}

    def address(self, name: str) -> str:
        """Return host:port of a port."""
        return f"{self.settings.host}:{self.ports[name]}"

    def describe(self) -> dict[str, Any]:
        """Return what the ready file says."""
        pids = {name: child.pid for name, child in self.children.items()}
        return {
            "model": model_name(self.settings),
            "http": f"http://{self.address('http')}",
            "grpc": self.address("grpc"),
            "fleet": self.address("fleet"),
            "metrics": f"http://{self.address('metrics')}/metrics",
            "ports": self.ports,
            "pids": {"up": os.getpid(), **pids},
        }


@asynccontextmanager
async def local_mesh(settings: UpSettings, say: Say) -> AsyncGenerator[Mesh, None]:
    """Run a mesh for the time of the context; it serves when the context is entered.

    Raises:
        ServiceFailed: It can't start: a port is taken, the model is missing, flags are
            refused, or nothing was served in time.
    """
    ready_file = settings.ready_file
    if ready_file is not None and not ready_file.parent.is_dir():
        raise ServiceFailed(f"--ready-file: there is no folder {ready_file.parent}")
    base = settings.port_base or find_port_base(settings)
    services = plan(settings, port_base=base)
    _check_ports(settings.host, services)
    await _convert(settings.model, say)
    mesh = Mesh(settings, services, {})

    def rewrite() -> None:
        if ready_file is not None and ready_file.exists():
            _write(ready_file, mesh.describe())

    for service in services:
        mesh.children[service.name] = Child(
            service.name, service.argv, say=say, on_start=rewrite, grace_s=settings.grace_s
        )
    try:
        async with _running(mesh):
            await _until_served(mesh)
            if ready_file is not None:
                _write(ready_file, mesh.describe())
            yield mesh
    finally:
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)


@asynccontextmanager
async def _running(mesh: Mesh) -> AsyncGenerator[None, None]:
    """Run all children for the time of the context."""
    if (stale := mesh.settings.ready_file) is not None:
        stale.unlink(missing_ok=True)
    try:
        async with asyncio.TaskGroup() as tasks:
            for child in mesh.children.values():
                tasks.create_task(child.run())
            try:
                yield
            finally:
                await _stop(list(mesh.children.values()))
    except BaseExceptionGroup as group:
        # A group of one, unless several fail together: the first says enough.
        raise group.exceptions[0] from group


async def _stop(children: Sequence[Child]) -> None:
    # The router first: it finishes streams while the others still work for it.
    router, *leaves = children
    await router.stop()
    await asyncio.gather(*(leaf.stop() for leaf in leaves))


async def _until_served(mesh: Mesh) -> None:
    """Return when every replica is ready and a request was answered.

    Raises:
        ServiceFailed: That took too long.
    """
    limit_s = mesh.settings.ready_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            while not await _is_serving(mesh):  # noqa: ASYNC110 - other processes tell nothing
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise ServiceFailed(f"no request was served within {limit_s:g} s") from error


async def _is_serving(mesh: Mesh) -> bool:
    try:
        if (await _http(mesh, "GET", "/readiness"))[0] != 200:
            return False
        _, body = await _http(mesh, "GET", "/v1/models")
        ready = sum(model["ready_replicas"] for model in json.loads(body)["data"])
        if ready < mesh.settings.groups * mesh.settings.dp:
            return False
        first = json.dumps({"prompt": "ready?", "max_tokens": 1}).encode()
        return (await _http(mesh, "POST", "/v1/completions", first))[0] == 200
    except OSError:
        return False


async def _http(mesh: Mesh, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    """Make one call; return status and body. HTTP/1.0: the answer ends with the connection."""
    head = [
        f"{method} {path} HTTP/1.0",
        f"host: {mesh.address('http')}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"authorization: Bearer {mesh.settings.api_key or ''}",
    ]
    reader, writer = await asyncio.open_connection(mesh.settings.host, mesh.ports["http"])
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        answer = await reader.read(-1)
    finally:
        writer.close()
    headers, _, content = answer.partition(b"\r\n\r\n")
    if not headers.startswith(b"HTTP/"):
        raise ConnectionError("the router closed the connection")
    return int(headers.split(b" ", 2)[1]), content


async def _convert(model: str, say: Say) -> None:
    """Convert a GGUF file, or the default model, unless it was; in a process of its own.

    Raises:
        ServiceFailed: There is no such model.
    """
    if _is_usable(model):
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "worker.model.convert",
        model,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        while process.stdout and (line := await process.stdout.readline()):
            say("convert", line.decode(errors="replace").rstrip())
        status = await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    if status:
        raise ServiceFailed(f"the model {model!r} cannot be used")


def _is_usable(model: str) -> bool:
    """Whether services can load the model as it is; else it is a GGUF file to convert.

    Raises:
        ServiceFailed: There is no such model.
    """
    try:
        if is_model_dir(Path(model)):
            return True
        gguf = find_gguf(model)
        if gguf is None:
            resolve(model)
    except InvalidRequest as error:
        raise ServiceFailed(error.message) from error
    return gguf is None or is_model_dir(converted_dir(gguf))


def find_port_base(settings: UpSettings) -> int:
    """Return a first port from which every port that the mesh needs is free now.

    Raises:
        ServiceFailed: None was found.
    """
    # Below the range from which the kernel takes ports for connections.
    for base in random.sample(range(10_000, 32_000, 10), 200):
        with suppress(ServiceFailed):
            _check_ports(settings.host, plan(settings, port_base=base))
            return base
    raise ServiceFailed("no free range of ports was found")


def _check_ports(host: str, services: Sequence[Service]) -> None:
    for service in services:
        for name, port in service.ports.items():
            try:
                socket.create_server((host, port)).close()
            except OSError as error:
                raise ServiceFailed(
                    f"port {port} ({name}) on {host} can't be had ({error.strerror}); "
                    "choose another --port-base"
                ) from error


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is never seen half."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
