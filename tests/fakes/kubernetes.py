"""A Kubernetes API that knows EndpointSlices: lists in pages, watches, forgets old versions.

async with FakeKubernetes() as api:
    await api.put(endpoint_slice("workers-1", [pod("uid-1", "10.0.0.1")], port=30100))
    ... api.url ...
    api.mute = True          # changes are made, and no watcher is told
    await api.forget()       # watchers' versions are too old: 410
    await api.leave(); await api.come_back()
"""

import asyncio
import json
from collections.abc import Sequence
from typing import Any, Self

from aiohttp import web

SERVICE = "workers"


def pod(
    uid: str, address: str, *, ready: bool | None = None, terminating: bool = False, name: str = ""
) -> dict[str, Any]:
    """An endpoint, as the API writes it."""
    conditions: dict[str, bool] = {"terminating": True, "serving": True} if terminating else {}
    if ready is not None:
        conditions["ready"] = ready
    return {
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "uid": uid, "name": name or f"pod-{uid}"},
    }


def endpoint_slice(
    name: str,
    endpoints: Sequence[dict[str, Any]],
    *,
    port: int = 30100,
    service: str = SERVICE,
    family: str = "IPv4",
    **labels: str,
) -> dict[str, Any]:
    """A slice of a Service."""
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": service, **labels}},
        "addressType": family,
        "ports": [{"name": "grpc", "protocol": "TCP", "port": port}],
        "endpoints": list(endpoints),
    }


def _selected(found: dict[str, Any], selector: str) -> bool:
    wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
    labels = found["metadata"]["labels"]
    return all(labels.get(key) == value for key, value in wanted.items())


class FakeKubernetes:
    """The API at a port.

    Attributes:
        lists, watches: How often these were asked, pages counted apart.
        watchers: Watches that are open.
        versions: What they began from.
        mute: Watchers are told nothing.
        page: Most items of one page.
    """

    def __init__(self) -> None:
        self.lists = 0
        self.watches = 0
        self.watchers = 0
        self.versions: list[int] = []
        self.mute = False
        self.page = 1000
        self._hang_up = 0
        self._port = 0
        self._version = 100
        self._floor = 0
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._log: list[tuple[int, str, dict[str, Any]]] = []
        self._changed = asyncio.Condition()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        await self.come_back()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def come_back(self) -> None:
        """Listen, at the same port as before."""
        app = web.Application()
        base = "/apis/discovery.k8s.io/v1"
        app.router.add_get(f"{base}/namespaces/{{namespace}}/endpointslices", self._get)
        app.router.add_get(f"{base}/endpointslices", self._get)
        self._runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def leave(self) -> None:
        """End all watches and stop listening."""
        await self.hang_up()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def put(self, found: dict[str, Any], namespace: str = "default") -> None:
        """Make or change a slice."""
        found = json.loads(json.dumps(found))
        found["metadata"]["namespace"] = namespace
        key = (namespace, found["metadata"]["name"])
        kind = "MODIFIED" if key in self._objects else "ADDED"
        self._objects[key] = found
        await self._tell(kind, found)

    async def delete(self, name: str, namespace: str = "default") -> None:
        """Delete a slice."""
        await self._tell("DELETED", self._objects.pop((namespace, name)))

    async def forget(self) -> None:
        """Compact: nothing before now can be watched from, and watches end."""
        self._floor = self._version + 1
        await self.bookmark()

    async def hang_up(self) -> None:
        """End all watches, as an API server does every few minutes."""
        async with self._changed:
            self._hang_up += 1
            self._changed.notify_all()

    async def bookmark(self) -> None:
        """Something else changed; watchers are told the version alone."""
        await self._tell("BOOKMARK", {"metadata": {"labels": {}}})

    async def _tell(self, kind: str, found: dict[str, Any]) -> None:
        self._version += 1
        found["metadata"]["resourceVersion"] = str(self._version)
        async with self._changed:
            if not self.mute:
                self._log.append((self._version, kind, json.loads(json.dumps(found))))
            self._changed.notify_all()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch", "").lower() == "true":
            return await self._watch(request)
        self.lists += 1
        selector, namespace = request.query.get("labelSelector", ""), _namespace(request)
        items = [
            found
            for (place, _), found in sorted(self._objects.items())
            if namespace in {place, None} and _selected(found, selector)
        ]
        start = int(request.query.get("continue", "0"))
        end = start + self.page
        meta = {"resourceVersion": str(self._version)}
        if end < len(items):
            meta["continue"] = str(end)
        return web.json_response({"metadata": meta, "items": items[start:end]})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        version = int(request.query["resourceVersion"])
        self.versions.append(version)
        response = web.StreamResponse()
        await response.prepare(request)
        self.watchers += 1
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                await self._stream(request, response, version)
        except TimeoutError:
            pass
        finally:
            self.watchers -= 1
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, version: int
    ) -> None:
        selector, namespace = request.query.get("labelSelector", ""), _namespace(request)
        calls = self._hang_up
        while True:
            if version < self._floor:
                said = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                await response.write(_line("ERROR", said))
                return
            for at, kind, found in [each for each in self._log if each[0] > version]:
                version = at
                mine = namespace in {found["metadata"].get("namespace"), None}
                if kind == "BOOKMARK" or (mine and _selected(found, selector)):
                    await response.write(_line(kind, found))
            if calls != self._hang_up:
                return
            async with self._changed:
                news = any(at > version for at, _, _ in self._log)
                if not news and version >= self._floor and calls == self._hang_up:
                    await self._changed.wait()


def _namespace(request: web.Request) -> str | None:
    return request.match_info.get("namespace")


def _line(kind: str, found: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"
