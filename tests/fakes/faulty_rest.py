"""What a mesh holds when nothing runs: nothing. Read from outside: pages, calls, processes."""

import asyncio
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from radixmesh.client import Replica
from radixmesh.errors import MeshError
from tests.fakes.faulty_mesh import POLL_S, FaultyMesh

# Gauges that are zero when nothing runs.
NOTHING = {
    "radixmesh_router_requests_in_flight_count",
    "radixmesh_router_requests_queued_count",
    "radixmesh_router_link_entries_count",
    "radixmesh_router_link_pending_bytes",
    "radixmesh_tokenizer_entries_in_flight_count",
    "radixmesh_detokenizer_entries_in_flight_count",
    "radixmesh_worker_running_count",
    "radixmesh_worker_waiting_count",
    "radixmesh_worker_uncached_tokens_count",
}
# What a process may grow by, however often it serves so many requests at once: caches fill,
# allocators keep what was used at the peak.
FDS_SLACK = 8
RSS_SLACK_BYTES = 24 << 20
RSS_SLACK_BYTES_PER_STREAM = 20 << 10


async def samples(port: int) -> list[Sample]:
    """Scrape a page; return every series."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(read))
    return [sample for family in families for sample in family.samples]


async def sample(port: int, name: str, **labels: str) -> float:
    """The sum of the series of a name that have these labels."""
    return sum(
        one.value
        for one in await samples(port)
        if one.name == name and labels.items() <= one.labels.items()
    )


async def held(mesh: FaultyMesh) -> dict[str, object]:
    """What is not as in an unharmed mesh where nothing runs."""
    found: dict[str, object] = {}
    cached: dict[tuple[str, int], int] = {}
    for name, port in mesh.ports.items():
        if not name.endswith("-metrics"):
            continue
        service, pages = name.removesuffix("-metrics"), await samples(port)
        found |= {
            f"{service} {one.name} {one.labels}": one.value
            for one in pages
            if one.name in NOTHING and one.value
        }
        cached |= {
            (service, int(one.labels["dp_rank"])): int(one.value)
            for one in pages
            if one.name == "radixmesh_worker_cached_blocks_count"
        }
    for router in mesh.shape.routers:
        async with mesh.fleet(router) as fleet:
            replicas = await fleet.list_replicas()
        if not mesh.whole(replicas):
            found[f"{router} fleet"] = [
                (one.group_id, one.dp_rank, one.phase, one.view, one.reason) for one in replicas
            ]
        found |= {
            f"{router} {one.group_id}/{one.dp_rank}": wrong
            for one in replicas
            if (wrong := _wrong(one, cached.get((one.group_id, one.dp_rank))))
        }
    return found


def _wrong(replica: Replica, cached: int | None) -> str:
    counts = (replica.running_count, replica.waiting_count, replica.in_flight_count)
    if any(counts):
        return f"running, waiting, in flight: {counts}"
    if replica.free_block_count != replica.kv_block_count:
        return f"{replica.free_block_count} of {replica.kv_block_count} blocks are free"
    if replica.cached_block_count != cached:
        return f"{replica.cached_block_count} blocks in the view, {cached} in the cache"
    return ""


async def until_nothing_is_held(mesh: FaultyMesh, within_s: float) -> None:
    """Wait until everything is as before.

    Raises:
        AssertionError: It is not, in time.
    """
    found: dict[str, object] = {"nobody": "answers"}
    try:
        async with asyncio.timeout(within_s):
            while True:
                with suppress(MeshError, OSError):
                    found = await held(mesh)
                    if not found:
                        return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"after {within_s} s: {found}") from None


@dataclass(frozen=True, slots=True)
class _Size:
    name: str
    rss: int
    fds: int


class Footprints:
    """How large each process was when it was first seen at rest."""

    def __init__(self) -> None:
        self._first: dict[psutil.Process, _Size] = {}

    def grown(self, mesh: FaultyMesh, streams: int) -> Sequence[str]:
        """Look at all processes; say which have grown. New ones are noted.

        Args:
            mesh: At rest.
            streams: So many ran at once.
        """
        said = []
        slack = RSS_SLACK_BYTES + streams * RSS_SLACK_BYTES_PER_STREAM
        for service in mesh.services.values():
            for process in service.tree():
                size = _Size(service.name, process.memory_info().rss, process.num_fds())
                first = self._first.setdefault(process, size)
                if size.fds > first.fds + FDS_SLACK or size.rss > first.rss + slack:
                    said.append(f"{service.name}: {first}, now {size}")
        return said
