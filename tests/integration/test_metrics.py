"""What is declared is counted: a short run with some trouble moves every metric."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from radixmesh.errors import InternalError, RateLimited
from radixmesh.telemetry.metrics import RouterMetrics, TextMetrics, WorkerMetrics
from router.tree.meta_tree import BYTES_PER_KEY
from tests.fakes.pages import Page, declared, page
from tests.fakes.router_end import UP, attach
from tests.fakes.router_mesh import Got, RouterMesh, eventually, run_mesh
from tests.fakes.scripted_ranks import Row, ScriptedLauncher
from tests.fakes.worker_front import free_port, run_front
from worker.request import LENGTH, CacheChange, Started

PROMPT = "Once upon a time there was a small model that lived in a cache."
INDEX_BYTES = 1 << 20
# What the mesh looks like while nothing runs.
AT_REST = {
    "radixmesh_router_tenants_count",
    "radixmesh_router_links_up_count",
    "radixmesh_router_replicas_count",
    "radixmesh_router_replicas_standing_count",
    "radixmesh_router_tree_blocks_count",
}
# What a group looks like without routers, with what it has learned of itself.
GROUP_AT_REST = {
    "radixmesh_worker_kv_blocks_count",
    "radixmesh_worker_kv_free_blocks_count",
    "radixmesh_worker_ready_count",
    "radixmesh_worker_prefill_tokens_per_second",
    "radixmesh_worker_decode_step_seconds",
}


async def run_into_trouble(mesh: RouterMesh) -> None:
    """Refuse a tenant, cut every link in a stream, fail, lose a cache event, overfill the index."""

    def cut(got: Got) -> None:
        if len(got.ids.get(0, ())) == 8:
            for proxy in (*mesh.worker_proxies, *mesh.tokenizers, *mesh.detokenizers):
                proxy.cut()

    await mesh.generate(PROMPT, 16, tenant="poor")
    with pytest.raises(RateLimited):
        await mesh.generate(PROMPT, 16, tenant="poor")
    got = await mesh.generate(PROMPT, 16, watch=cut)
    assert got.text == mesh.text.output(PROMPT, 16)
    [worker] = mesh.workers
    worker.refuse = [InternalError("a bug")] * 2
    with pytest.raises(InternalError):
        await mesh.generate(PROMPT)
    asked = worker.resnapshots
    worker.lose_events = True
    worker.warm(0, range(100, 108))
    worker.lose_events = False
    worker.warm(0, range(200, 208))
    await eventually(lambda: worker.resnapshots > asked)
    tokens = worker.shape.block_tokens * (INDEX_BYTES // BYTES_PER_KEY)
    for salt in ("one", "two"):
        worker.warm(0, range(tokens * 2 // 3), salt=salt)


async def settled(port: int, held: set[str]) -> Page:
    """The page once the gauges that are not zero are these; a ping may wait when it is scraped.

    Raises:
        AssertionError: They are not, in time.
    """
    said = await page(port)
    try:
        async with asyncio.timeout(5):
            while said.held != held:
                said = await page(port)
    except TimeoutError:
        raise AssertionError(f"not as at rest: {said.held ^ held}") from None
    return said


async def test_every_metric_of_router_and_text_services_moves(model_dir: Path) -> None:
    ports = [free_port(), free_port()]
    flags: dict[str, Any] = {
        "index_bytes": INDEX_BYTES,
        "breaker_failures": 1,
        "tenant_limits": {"poor": {"requests_per_minute": 1}},
    }
    async with run_mesh(model_dir, workers=1, text_metrics=ports, **flags) as mesh:
        await run_into_trouble(mesh)
        await mesh.until_nothing_is_held()
        router = await settled(mesh.ports.http, AT_REST)
        texts = {
            service: await settled(port, {f"radixmesh_{service}_links_count"})
            for service, port in zip(("tokenizer", "detokenizer"), ports, strict=True)
        }
    assert {*router.gauges, *router.counts} == declared(RouterMetrics)
    assert router.unmoved == set()
    for service, said in texts.items():
        assert {*said.gauges, *said.counts} == declared(partial(TextMetrics, service=service))
        assert said.unmoved == set()


async def test_every_metric_of_a_worker_group_moves(model_dir: Path) -> None:
    launcher, port = ScriptedLauncher(), free_port()
    flags: dict[str, Any] = {"metrics_port": port, "probe_interval_s": 0.02}
    async with run_front(model_dir, launch=launcher, **flags) as address:
        async with attach(address) as router:
            await router.until_up(0)
            ranks = await launcher.incarnation(0, 0)
            output = router.submit([5, 6, 7], max_tokens=1)
            [add] = await ranks.adds(1)
            ranks.step(
                [Row(add.request_id, 0, [10], LENGTH)],
                started=[Started(add.request_id, 2, 0)],
                changes=[CacheChange(stored=[1, 2])],
            )
            await output.result()
            await ranks.probed.wait()
            ranks.die()
            await launcher.incarnation(0, 1)
            await router.until(lambda: router.history[-1] == (0, UP))
        said = await settled(port, GROUP_AT_REST)
    assert {*said.gauges, *said.counts} == declared(WorkerMetrics)
    # Only a router that reads too slowly moves this one: see test_worker_slow_router.
    assert said.unmoved == {"radixmesh_worker_feed_drops"}
