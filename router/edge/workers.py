"""/workers, /get_loads and /flush_cache, as people know them from SGLang's gateway.

A worker here is a worker group, its id is the group's name. Knows HTTP and JSON shapes; what
becomes of a group decides the fleet. Off unless it is wanted: whoever may call it may take
workers out.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from radixmesh.errors import (
    BadApiKey,
    InvalidRequest,
    MeshError,
    NotSupported,
    UnsupportedParameter,
)
from router.discovery.member import is_address
from router.edge.admission import ApiKey
from router.edge.body import read_body
from router.fleet.group import Group
from router.fleet.registry import Fleet
from router.fleet.views import Phase, ReplicaView

SCHEME: Final = "grpc://"
MAX_BODY_BYTES: Final = 64 * 1024
_FLUSHES_AT_ONCE: Final = 32

Flush = Callable[[str], Awaitable[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersAccess:
    """Who may call.

    Attributes:
        on: Whether anybody may.
        api_key: The key that is wanted as a Bearer token; empty: none.
        leave_grace_s: Streams of a worker that is taken out have so long to finish.
    """

    on: bool
    api_key: str = ""
    leave_grace_s: float = 60.0


def add_workers(app: FastAPI, fleet: Fleet, access: WorkersAccess, flush: Flush) -> None:
    """Offer the calls.

    Args:
        app: The HTTP edge, which answers errors.
        fleet: Of this router.
        access: Who may call.
        flush: Empties the caches of the group at an address.
    """
    edge = _Workers(fleet, access, flush)
    routes: Sequence[tuple[str, str, Callable[..., Awaitable[Response]]]] = (
        ("GET", "/workers", edge.list_all),
        ("POST", "/workers", edge.add),
        ("GET", "/workers/{worker_id:path}", edge.get),
        ("DELETE", "/workers/{worker_id:path}", edge.remove),
        ("GET", "/get_loads", edge.loads),
        ("POST", "/flush_cache", edge.flush),
    )
    for method, path, handler in routes:
        app.add_api_route(path, handler, methods=[method], response_model=None)


class _Workers:
    """The handlers."""

    def __init__(self, fleet: Fleet, access: WorkersAccess, flush: Flush) -> None:
        self._fleet = fleet
        self._access = access
        self._key = ApiKey(access.api_key)
        self._flush = flush

    def _check(self, request: Request) -> None:
        if not self._access.on:
            raise NotSupported("this router operates workers over HTTP only with --workers-api")
        if not self._access.api_key and "origin" in request.headers:
            # Without a key, any page that an administrator opens could call.
            raise BadApiKey("web pages may call this only where an API key is wanted")
        self._key.check(request.headers.get("authorization"))

    async def list_all(self, request: Request) -> Response:
        self._check(request)
        rows = self._rows()
        workers = [_worker(group, rows[group.group_id]) for group in self._fleet.groups]
        stats = {"prefill_count": 0, "decode_count": 0, "regular_count": len(workers)}
        return JSONResponse({"workers": workers, "total": len(workers), "stats": stats})

    async def get(self, request: Request, worker_id: str) -> Response:
        self._check(request)
        return JSONResponse(_worker(self._fleet.groups.get(worker_id), self._rows()[worker_id]))

    async def add(self, request: Request) -> Response:
        self._check(request)
        address = read_worker(await read_body(request, limit_bytes=MAX_BODY_BYTES))
        worker_id = self._fleet.add_group(address)
        return _accepted(worker_id, "it gets requests as soon as it answers", address)

    async def remove(self, request: Request, worker_id: str) -> Response:
        self._check(request)
        self._fleet.drain_group(worker_id, remove=True, within_s=self._access.leave_grace_s)
        return _accepted(worker_id, "it gets nothing new, and leaves when its streams have ended")

    async def loads(self, request: Request) -> Response:
        self._check(request)
        rows = self._rows()
        return JSONResponse(
            {"workers": [_load(group, rows[group.group_id]) for group in self._fleet.groups]}
        )

    async def flush(self, request: Request) -> Response:
        self._check(request)
        groups, at_once = list(self._fleet.groups), asyncio.Semaphore(_FLUSHES_AT_ONCE)

        async def one(group: Group) -> dict[str, str] | None:
            async with at_once:
                try:
                    await self._flush(group.address)
                except MeshError as error:
                    return {"worker": SCHEME + group.address, "error": error.message}
            return None

        outcomes = await asyncio.gather(*(one(group) for group in groups))
        failed = [outcome for outcome in outcomes if outcome]
        return _flushed([SCHEME + group.address for group in groups], failed)

    def _rows(self) -> dict[str, list[ReplicaView]]:
        rows: dict[str, list[ReplicaView]] = defaultdict(list)
        for view in self._fleet.replicas():
            rows[view.group_id].append(view)
        return rows


def read_worker(body: bytes) -> str:
    """Return the address of the worker that a body wants to add.

    Raises:
        InvalidRequest: It is no JSON object with a `url` of the form grpc://HOST:PORT.
        UnsupportedParameter: It is of a kind that this mesh does not have.
    """
    try:
        wanted = json.loads(body)
    except (ValueError, RecursionError):
        raise InvalidRequest("the body is no JSON") from None
    url = wanted.get("url") if isinstance(wanted, dict) else None
    if not isinstance(url, str):
        raise InvalidRequest("the body must be an object with a url", field="url")
    if wanted.get("worker_type", "regular") != "regular":
        raise UnsupportedParameter(
            "workers are all regular: they prefill and decode", field="worker_type"
        )
    return address_of(url)


def address_of(url: str) -> str:
    """Return HOST:PORT of grpc://HOST:PORT, or of that alone.

    Raises:
        InvalidRequest: It is something else.
    """
    scheme, mark, rest = url.rpartition("://")
    address = rest.rstrip("/")
    if (mark and scheme != "grpc") or not is_address(address) or "/" in address:
        raise InvalidRequest("a worker group is at grpc://HOST:PORT", field="url")
    return address


def _worker(group: Group, rows: Sequence[ReplicaView]) -> dict[str, Any]:
    ready = sum(row.phase is Phase.READY for row in rows)
    return {
        "id": group.group_id,
        "url": SCHEME + group.address,
        "model_id": group.info.model if group.info else "",
        "worker_type": "regular",
        "connection_mode": "grpc",
        "is_healthy": ready > 0,
        "load": group.in_flight,
        "reason": group.withheld,
        "replicas": [
            {
                "dp_rank": row.dp_rank,
                "phase": row.phase.name.lower(),
                "view": row.view.name.lower(),
                "reason": row.reason,
            }
            for row in rows
        ],
    }


def _load(group: Group, rows: Sequence[ReplicaView]) -> dict[str, Any]:
    loads = [_replica_load(row) for row in rows]
    used = sum(load["num_used_tokens"] for load in loads)
    return {
        "worker": SCHEME + group.address,
        "load": used if group.link.connected and loads else -1,
        "details": {"dp_rank_count": len(loads), "loads": loads},
    }


def _replica_load(row: ReplicaView) -> dict[str, Any]:
    used, most = max(0, row.kv_blocks - row.free_blocks), row.kv_blocks
    return {
        "dp_rank": row.dp_rank,
        "num_running_reqs": row.running,
        "num_waiting_reqs": row.waiting,
        "num_total_reqs": row.running + row.waiting,
        "num_used_tokens": used * row.block_tokens,
        "max_total_num_tokens": most * row.block_tokens,
        "token_usage": round(used / most, 3) if most else 0.0,
    }


def _accepted(worker_id: str, message: str, address: str = "") -> Response:
    location = "/workers/" + quote(worker_id, safe=":@")
    said = {"status": "accepted", "worker_id": worker_id, "location": location, "message": message}
    if address:
        said["url"] = SCHEME + address
    return JSONResponse(said, 202, headers={"location": location})


def _flushed(workers: Sequence[str], failed: Sequence[dict[str, str]]) -> Response:
    lost = {each["worker"] for each in failed}
    good = [worker for worker in workers if worker not in lost]
    body: dict[str, Any] = {
        "status": "partial_success" if failed else "success",
        "message": f"flushed the caches of {len(good)} of {len(workers)} workers",
        "workers_flushed": len(good),
        "total_workers": len(workers),
    }
    if failed:
        body.update(successful=good, failed=failed)
    return JSONResponse(body, 206 if failed else 200)
