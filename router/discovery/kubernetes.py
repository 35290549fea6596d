"""The Kubernetes API as a source: lists EndpointSlices, watches them, lists them anew.

Knows the API; what slices mean says `endpoints.py`. A list is the truth, a watch only makes it
quicker: after `resync_s` the watch ends and everything is listed again, whatever was said before.
"""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, cast

import aiohttp
from kubernetes_asyncio import client, config

from radixmesh.waits import Backoff
from router.discovery.endpoints import Slice, members_of
from router.discovery.lookup import ALL_NAMESPACES, Wanted
from router.discovery.member import Publish
from router.discovery.throttle import Throttle

logger = logging.getLogger(__name__)

PAGE: Final = 500
LIST_TIMEOUT_S: Final = 10.0
# When an API server starts anew, all its watchers are stale at once.
STALE_PAUSE_S: Final = 0.5
# Thousands of pods change one by one in a rollout; each list is looked at whole.
PUBLISH_PAUSE_S: Final = 0.05
BACKOFF_S: Final = 0.2
BACKOFF_MAX_S: Final = 5.0
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_GONE = 410
_JITTER = 0.2
_FAILURES = (
    client.ApiException,
    config.ConfigException,
    aiohttp.ClientError,
    OSError,  # TimeoutError too
    ValueError,
)


class Stale(Exception):
    """The API does not remember the version that a watch goes on from."""


class Api:
    """The part of the Kubernetes API that is asked.

    Args:
        url: Of the API server; empty: the cluster that this runs in, else that of kubectl.
    """

    def __init__(self, url: str = "") -> None:
        self._url = url
        self._client: client.ApiClient | None = None
        self._slices: client.DiscoveryV1Api | None = None

    async def close(self) -> None:
        """Close its connections."""
        if self._client is not None:
            await self._client.close()
            self._client = self._slices = None

    async def list(self, wanted: Wanted) -> tuple[str, list[Slice]]:
        """Return a version, and all slices as of it.

        Raises:
            kubernetes_asyncio.client.ApiException, OSError, ValueError: It can't be had.
        """
        slices: list[Slice] = []
        more: dict[str, str] = {}
        while True:
            response = await self._call(wanted, limit=PAGE, _request_timeout=LIST_TIMEOUT_S, **more)
            async with response:
                body = await _checked(response)
            meta = body.get("metadata") or {}
            slices.extend(body.get("items") or ())
            if not meta.get("continue"):
                return str(meta.get("resourceVersion", "")), slices
            more = {"_continue": meta["continue"]}

    async def watch(
        self, wanted: Wanted, version: str, *, timeout_s: float
    ) -> AsyncIterator[tuple[str, Slice]]:
        """Yield (kind, slice) of each change after a version; ends after `timeout_s` at the latest.

        Raises:
            Stale: The version is too old.
            kubernetes_asyncio.client.ApiException, OSError, ValueError: It broke.
        """
        response = await self._call(
            wanted,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=max(1, round(timeout_s)),
            _request_timeout=timeout_s + LIST_TIMEOUT_S,
        )
        async with response:
            if response.status != 200:
                await _checked(response)
            async for line in response.content:
                event = json.loads(line)
                kind, said = event["type"], event["object"]
                if kind == "ERROR":
                    raise _refusal(said.get("code", 0), said.get("message", ""))
                yield kind, said

    async def _call(self, wanted: Wanted, **options: Any) -> aiohttp.ClientResponse:
        api = self._slices or await self._connect()
        namespace = wanted.namespace or own_namespace()
        options.update(label_selector=wanted.selector, _preload_content=False)
        call = (
            api.list_endpoint_slice_for_all_namespaces(**options)
            if namespace == ALL_NAMESPACES
            else api.list_namespaced_endpoint_slice(namespace, **options)
        )
        response: Any = await call  # as it came, which the types do not know
        return cast("aiohttp.ClientResponse", response)

    async def _connect(self) -> client.DiscoveryV1Api:
        settings = client.Configuration()
        if self._url:
            settings.host = self._url.rstrip("/")
        elif await asyncio.to_thread(_OWN_NAMESPACE.exists):
            config.load_incluster_config(settings)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(client_configuration=settings)
        self._client = client.ApiClient(settings)
        self._slices = client.DiscoveryV1Api(self._client)
        return self._slices


async def _checked(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the body of an answer, which must be a good one."""
    body: Any = json.loads(await response.read())
    if response.status != 200 or not isinstance(body, dict):
        message = body.get("message", "") if isinstance(body, dict) else ""
        raise _refusal(response.status, message)
    return body


def _refusal(status: int, message: str) -> Exception:
    if status == _GONE:
        return Stale(message)
    return client.ApiException(status=status, reason=message)


def own_namespace() -> str:
    """Return the namespace that this pod runs in; outside of a cluster `default`."""
    try:
        return _OWN_NAMESPACE.read_text().strip() or "default"
    except OSError:
        return "default"


class KubernetesSource:
    """Lists the pods of a Service, or of all Services that a selector selects.

    Args:
        wanted: Which.
        api: Where it is asked.
        resync_s: Everything is listed anew so often, give or take a fifth.
        rng: That fifth, and the jitter of the back-off.
    """

    def __init__(self, wanted: Wanted, *, api: Api, resync_s: float, rng: random.Random) -> None:
        self.name = f"kubernetes {wanted.selector}"
        self._wanted = wanted
        self._api = api
        self._resync_s = resync_s
        self._rng = rng
        self._backoff = Backoff(BACKOFF_S, BACKOFF_MAX_S, rng)
        self._failing = False

    async def run(self, publish: Publish) -> None:
        """Publish all pods at first, and then after changes, until cancelled.

        While the API is away nothing is published: the last list stands.
        """
        try:
            while True:
                try:
                    await self._follow(publish)
                except Stale:
                    logger.info("listing anew", extra={"source": self.name})
                    await asyncio.sleep(self._rng.uniform(0, STALE_PAUSE_S))
                except _FAILURES as error:
                    self._warn(error)
                    await asyncio.sleep(self._backoff.next_s())
        finally:
            await self._api.close()

    async def _follow(self, publish: Publish) -> None:
        """List once, and watch until all is to be listed again."""
        version, listed = await self._api.list(self._wanted)
        slices = {_name(each): each for each in listed}
        self._failing = False
        self._backoff.reset()
        loop = asyncio.get_running_loop()
        until = loop.time() + self._resync_s * self._rng.uniform(1 - _JITTER, 1 + _JITTER)
        tell = Throttle(
            PUBLISH_PAUSE_S, lambda: publish(members_of(slices.values(), self._wanted.port))
        )
        tell()
        try:
            async with asyncio.timeout_at(until):
                while True:
                    version = await self._watch(version, slices, tell, until - loop.time())
        except TimeoutError:
            if loop.time() < until:
                raise  # not ours
        finally:
            tell.cancel()

    async def _watch(
        self, version: str, slices: dict[str, Slice], tell: Throttle, timeout_s: float
    ) -> str:
        """Take changes in while a watch lasts; return the version that it came to."""
        events = 0
        async with aclosing(
            self._api.watch(self._wanted, version, timeout_s=timeout_s)  # type: ignore[type-var]
        ) as watched:
            async for kind, said in watched:
                events += 1
                version = said["metadata"]["resourceVersion"]
                if kind == "BOOKMARK":
                    continue
                if kind == "DELETED":
                    slices.pop(_name(said), None)
                else:
                    slices[_name(said)] = said
                tell()
        if not events:
            await asyncio.sleep(self._backoff.next_s())  # it ended at once: don't spin
        return version

    def _warn(self, error: Exception) -> None:
        if not self._failing:
            logger.warning(
                "the list stays as it was",
                extra={"source": self.name, "error": f"{type(error).__name__}: {error}"[:300]},
            )
        self._failing = True


def _name(each: Slice) -> str:
    meta = each["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"
