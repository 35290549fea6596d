"""A mesh to measure, and the CPU seconds of its processes, by role."""

import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import psutil

from radixmesh.cli.mesh import Mesh, local_mesh
from radixmesh.cli.plan import UpSettings
from radixmesh.settings import load

ROLES = ("router", "front", "rank", "detokenizer", "tokenizer")

Seconds = Mapping[str, float]


def running(model: str, engine: str, *flags: str) -> AbstractAsyncContextManager[Mesh]:
    """Run a mesh on free ports for the time of the context; its complaints go to stderr."""
    usual = (f"--model={model}", f"--engine={engine}", "--port-base=0", "--log-level=error")
    settings = load(UpSettings, [*usual, *flags], prog="bench")
    return local_mesh(settings, lambda name, line: print(f"{name}: {line}", file=sys.stderr))


def by_role(mesh: Mesh) -> dict[str, list[psutil.Process]]:
    """Return the processes of each role; fronts and ranks of all groups together."""
    found: dict[str, list[psutil.Process]] = {role: [] for role in ROLES}
    for name, child in mesh.children.items():
        process = psutil.Process(child.pid)
        if name.startswith("worker"):
            found["front"].append(process)
            found["rank"] += process.children(recursive=True)
        else:
            found[name].append(process)
    return found


def seconds(roles: Mapping[str, list[psutil.Process]]) -> dict[str, float]:
    """Return the CPU time, user and system, that each role has used since its start."""
    return {role: sum(map(_seconds, processes)) for role, processes in roles.items()}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def difference(after: Seconds, before: Seconds) -> dict[str, float]:
    """Return what each role used in between."""
    return {role: after[role] - before[role] for role in after}
