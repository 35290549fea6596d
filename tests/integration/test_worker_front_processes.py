"""A worker group with real rank processes and the fake engine, seen from a router's link."""

import asyncio
import os
import random
import signal
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixmesh import errors
from radixmesh.blocks import pack_ids
from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.rank_processes import gone, ranks_of
from tests.fakes.router_end import DOWN, UP, Output, RouterEnd, attach
from tests.fakes.worker_front import free_port, run_front

pytestmark = [pytest.mark.e2e]


@pytest.fixture
def ordinary(model_dir: Path) -> list[int]:
    return ordinary_ids(model_dir)


def prompts(count: int, *, tokens: int = 40) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(4, 1000) for _ in range(tokens)] for _ in range(count)]


def drained(router: RouterEnd, dp_rank: int = 0) -> bool:
    """Whether a replica has no request and all its blocks are free or cached."""
    load, info = router.loads[dp_rank], router.info
    assert info is not None
    at = list(load.dp_ranks).index(dp_rank)
    return (
        load.running_counts[at] == load.waiting_counts[at] == 0
        and load.free_block_counts[at] == info.limits.kv_blocks
    )


async def test_outputs_are_exact_on_every_replica(model_dir: Path, ordinary: list[int]) -> None:
    async with run_front(model_dir, dp=2) as address, attach(address) as router:
        await router.until_up(0, 1)
        asked = prompts(16)
        outputs = [router.submit(prompt, max_tokens=20) for prompt in asked]
        for prompt, output in zip(asked, outputs, strict=True):
            assert await output.result() == oracle_output(prompt, ordinary, 20)
        for dp_rank in (0, 1):
            await router.until(lambda each=dp_rank: drained(router, each))  # type: ignore[misc]
            assert len(router.feeds[dp_rank].keys) > 0, "both had work"


async def test_the_feed_of_real_ranks_proves_itself(model_dir: Path) -> None:
    flags: dict[str, Any] = {"fake_kv_blocks": 40, "max_running": 8}
    async with (
        run_front(model_dir, **flags) as address,
        attach(address, "one") as one,
        attach(address, "two") as two,
    ):
        await asyncio.gather(one.until_up(0), two.until_up(0))
        # More than the cache holds, so that blocks are evicted all the time.
        outputs = [one.submit(prompt, max_tokens=8) for prompt in prompts(60, tokens=70)]
        for output in outputs:
            await output.result()
        proofs = one.feeds[0].proofs, two.feeds[0].proofs
        await one.until(lambda: one.feeds[0].proofs > proofs[0])
        await two.until(lambda: two.feeds[0].proofs > proofs[1])
        assert one.feeds[0].keys == two.feeds[0].keys
        assert one.feeds[0].snapshots == two.feeds[0].snapshots == 1


async def test_a_cancel_in_a_long_prefill_frees_everything_within_a_second(
    model_dir: Path,
) -> None:
    pace: dict[str, Any] = {"fake_prefill_tokens_per_s": 100, "max_batched_tokens": 32}
    async with run_front(model_dir, **pace) as address, attach(address) as router:
        await router.until_up(0)
        output = router.submit(prompts(1, tokens=3_000)[0])
        await router.until(lambda: output.started is not None)
        await router.until(lambda: not drained(router))
        router.link.cancel(output.entry_id)
        async with asyncio.timeout(1):
            await router.until(lambda: drained(router))


async def test_a_killed_rank_fails_its_requests_at_once_and_its_sibling_never_notices(
    model_dir: Path, ordinary: list[int]
) -> None:
    pace: dict[str, Any] = {"dp": 2, "fake_decode_ms": 10}
    async with run_front(model_dir, **pace) as address, attach(address) as router:
        await router.until_up(0, 1)
        asked = prompts(32)
        outputs = [
            router.submit(prompt, max_tokens=60, dp_rank=at % 2) for at, prompt in enumerate(asked)
        ]
        for output in outputs:
            await output.begun.wait()
        incarnations = [router.statuses[each].incarnation for each in (0, 1)]
        [victim] = ranks_of(os.getpid(), "dp=0")
        victim.send_signal(signal.SIGKILL)
        async with asyncio.timeout(2):
            for output in outputs[::2]:
                failure = await output.failure()
                assert isinstance(failure, errors.GroupLost)
                assert failure.message == "rank dp=0 pp=0 tp=0 was killed by SIGKILL"
        for prompt, output in zip(asked[1::2], outputs[1::2], strict=True):
            assert await output.result() == oracle_output(prompt, ordinary, 60)
        await router.until(lambda: router.state(0) == UP)
        assert router.statuses[0].incarnation != incarnations[0]
        assert router.statuses[1].incarnation == incarnations[1]
        await _resume_all(router, asked[::2], outputs[::2], ordinary)


async def _resume_all(
    router: RouterEnd, asked: list[list[int]], lost: list[Output], ordinary: list[int]
) -> None:
    """Continue each output where it was lost, on the restarted replica."""
    resumed = []
    for prompt, output in zip(asked, lost, strict=True):
        rest = Output(ids=list(output.ids))
        rest.entry_id = router.link.open(rest)
        submit = router.submit_of(rest.entry_id, prompt, max_tokens=60, dp_rank=0)
        submit.output_ids = pack_ids(output.ids)
        router.send(submit)
        resumed.append(rest)
    for prompt, rest in zip(asked, resumed, strict=True):
        assert await rest.result() == oracle_output(prompt, ordinary, 60)


@pytest.mark.parametrize("place", ["pp=0 tp=0", "pp=1 tp=1"])
async def test_any_rank_of_a_replica_takes_its_peers_with_it_and_all_come_back(
    model_dir: Path, ordinary: list[int], place: str
) -> None:
    async with (
        run_front(model_dir, pp=2, tp=2, fake_decode_ms=10) as address,
        attach(address) as router,
    ):
        await router.until_up(0)
        first = ranks_of(os.getpid())
        assert len(first) == 4
        [prompt] = prompts(1)
        output = router.submit(prompt, max_tokens=500)
        await output.begun.wait()
        [victim] = ranks_of(os.getpid(), place)
        victim.send_signal(signal.SIGKILL)
        async with asyncio.timeout(2):
            assert isinstance(await output.failure(), errors.GroupLost)
        await gone(first)
        await router.until_up(0)
        assert len(ranks_of(os.getpid())) == 4
        again = router.submit(prompt, max_tokens=20)
        assert await again.result() == oracle_output(prompt, ordinary, 20)


async def test_ranks_that_disagree_are_reported_as_that(model_dir: Path) -> None:
    flags: dict[str, Any] = {"tp": 2, "fake_faults": ["desync@prompt-contains=77:tp=1"]}
    async with run_front(model_dir, **flags) as address, attach(address) as router:
        await router.until_up(0)
        output = router.submit([77, 5, 6], max_tokens=200)
        assert isinstance(await output.failure(), errors.RankDesync)
        await router.until(lambda: router.state(0) == UP)


async def test_a_stopped_rank_is_given_up_and_replaced(
    model_dir: Path, ordinary: list[int]
) -> None:
    async with (
        run_front(model_dir, step_timeout_s=0.5, fake_decode_ms=10) as address,
        attach(address) as router,
    ):
        await router.until_up(0)
        [prompt] = prompts(1)
        output = router.submit(prompt, max_tokens=500)
        await output.begun.wait()
        [rank] = ranks_of(os.getpid())
        rank.send_signal(signal.SIGSTOP)
        assert isinstance(await output.failure(), errors.GroupLost)
        await gone([rank])
        await router.until_up(0)
        again = router.submit(prompt, max_tokens=20)
        assert await again.result() == oracle_output(prompt, ordinary, 20)


async def test_a_request_that_kills_its_rank_again_and_again_hurts_no_other_replica(
    model_dir: Path,
) -> None:
    flags: dict[str, Any] = {"dp": 2, "fake_faults": ["exit@prompt-contains=77"]}
    async with run_front(model_dir, **flags) as address, attach(address) as router:
        await router.until_up(0, 1)
        router.history.clear()
        for _ in range(3):
            await router.until(lambda: router.state(0) == UP)
            poison = router.submit([77], dp_rank=0)
            assert isinstance(await poison.failure(), errors.GroupLost)
            assert router.state(0) == DOWN
        fine = router.submit([5], dp_rank=1, max_tokens=4)
        assert len(await fine.result()) == 4
        assert (1, DOWN) not in router.history


@pytest.mark.parametrize("pp", [1, 4])
async def test_two_hundred_streams_half_of_them_cancelled_leave_nothing(
    model_dir: Path, pp: int
) -> None:
    rng = random.Random(7)
    async with (
        run_front(model_dir, pp=pp, fake_decode_ms=2, max_running=32) as address,
        attach(address) as router,
    ):
        await router.until_up(0)
        router.history.clear()
        outputs = [router.submit(prompt, max_tokens=30) for prompt in prompts(200)]

        async def leave(output: Output) -> None:
            await asyncio.sleep(rng.random())
            router.link.cancel(output.entry_id)

        async with asyncio.TaskGroup() as tasks:
            for output in outputs[::2]:
                tasks.create_task(leave(output))
        for output in outputs[1::2]:
            assert len(await output.result()) == 30
        async with asyncio.timeout(2):
            await router.until(lambda: drained(router))
        assert not router.link.entries
        assert router.history == [], "all ranks agreed to the end"


def scrape(port: int) -> dict[tuple[str, str], float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
        text = page.read().decode()
    return {
        (sample.name, sample.labels.get("outcome", sample.labels.get("dp_rank", ""))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_count_a_request_once_whatever_its_ranks_and_gauges_return_to_zero(
    model_dir: Path,
) -> None:
    flags: dict[str, Any] = {"tp": 4, "metrics_port": (port := free_port())}
    async with run_front(model_dir, **flags) as address, attach(address) as router:
        await router.until_up(0)
        outputs = [router.submit(prompt, max_tokens=6) for prompt in prompts(10)]
        for output in outputs:
            await output.result()
        await router.until(lambda: drained(router))
        values = await asyncio.to_thread(scrape, port)
    assert values["radixmesh_worker_requests_total", "finished"] == 10
    assert values["radixmesh_worker_output_tokens_total", "0"] == 60
    assert values["radixmesh_worker_prompt_tokens_total", "0"] == 400
    assert values["radixmesh_worker_running_count", "0"] == 0
    assert values["radixmesh_worker_waiting_count", "0"] == 0
    assert values["radixmesh_worker_ready_count", "0"] == 1
    assert values["radixmesh_worker_restarts_total", "0"] == 0
    assert values["radixmesh_worker_links_count", ""] == 1


async def test_an_idle_group_uses_next_to_no_cpu(model_dir: Path) -> None:
    async with run_front(model_dir, dp=2, tp=2) as address, attach(address) as router:
        await router.until_up(0, 1)
        ranks = ranks_of(os.getpid())
        assert len(ranks) == 4

        def used() -> float:
            return sum(sum(process.cpu_times()[:2]) for process in [*ranks, psutil.Process()])

        # This process also holds the router and the test itself; the ranks wait in the kernel.
        proofs = router.feeds[0].proofs
        before = used()
        await router.until(lambda: router.feeds[0].proofs == proofs + 3)
        assert used() - before < 0.15, "5 % of one core in 3 s"
