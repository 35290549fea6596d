"""Requests for which the router named no replica, while load reports are late or old."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.router_end import DRAINING, RouterEnd, attach
from tests.fakes.scripted_ranks import Row, ScriptedLauncher, ScriptedRanks
from tests.fakes.worker_front import run_front
from worker.front.dispatch import BURDENS
from worker.request import LENGTH


@asynccontextmanager
async def group(
    model_dir: Path, dispatch: str, **flags: Any
) -> AsyncGenerator[tuple[RouterEnd, list[ScriptedRanks]], None]:
    launcher = ScriptedLauncher()
    front = run_front(model_dir, launch=launcher, dp=4, dispatch=dispatch, **flags)
    async with front as address, attach(address) as router:
        await router.until_up(0, 1, 2, 3)
        yield router, [await launcher.incarnation(each, 0) for each in range(4)]


def free_blocks(router: RouterEnd, dp_rank: int) -> int:
    load = router.loads[dp_rank]
    return load.free_block_counts[list(load.dp_ranks).index(dp_rank)]


@pytest.mark.parametrize("dispatch", BURDENS)
async def test_a_burst_spreads_evenly_though_no_load_report_knows_of_it(
    model_dir: Path, dispatch: str
) -> None:
    async with group(model_dir, dispatch) as (router, ranks):
        for _ in range(64):
            router.submit([5, 6, 7])
        async with asyncio.timeout(5):
            for each in ranks:
                await each.adds(16)


@pytest.mark.parametrize("dispatch", BURDENS)
async def test_requests_one_by_one_to_idle_replicas_go_to_each_in_turn(
    model_dir: Path, dispatch: str
) -> None:
    async with group(model_dir, dispatch) as (router, ranks):
        for turn in range(8):
            output = router.submit([5])
            at = turn % 4
            async with asyncio.timeout(5):
                [add] = await ranks[at].adds(1)
            ranks[at].step([Row(add.request_id, 0, [9], LENGTH)])
            await output.result()


@pytest.mark.parametrize("dispatch", ["tokens", "shortest_queue"])
async def test_a_report_from_before_a_dispatch_does_not_make_its_replica_look_idle(
    model_dir: Path, dispatch: str
) -> None:
    async with group(model_dir, dispatch) as (router, ranks):
        router.submit([5])
        [add] = await ranks[0].adds(1)
        for stale in ranks:
            stale.last_request_id = add.request_id - 1
            stale.step(load=msgspec.structs.replace(stale.load(), free_blocks=99))
        await router.until(lambda: all(free_blocks(router, at) == 99 for at in range(4)))
        for _ in range(3):
            router.submit([5])
        async with asyncio.timeout(5):
            for other in ranks[1:]:
                await other.adds(1)


@pytest.mark.parametrize("dispatch", BURDENS)
async def test_a_replica_that_is_not_ready_gets_nothing_though_it_has_the_least_to_do(
    model_dir: Path, dispatch: str
) -> None:
    pace: dict[str, Any] = {"probe_interval_s": 0.05, "probe_timeout_s": 0.2}
    async with group(model_dir, dispatch, **pace) as (router, ranks):
        ranks[2].answers_probes = False
        await router.until(lambda: router.state(2) == DRAINING)
        for _ in range(30):
            router.submit([5])
        async with asyncio.timeout(5):
            for at in (0, 1, 3):
                await ranks[at].adds(10)
