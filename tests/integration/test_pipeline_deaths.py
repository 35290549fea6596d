"""The whole mesh over real channels, with links cut and processes gone in mid-stream."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from radixmesh.blocks import unpack_ids
from radixmesh.common.v1.sampling_pb2 import LogitBias, SamplingParams
from radixmesh.errors import (
    MeshError,
    NoReplicaReady,
    QueueFull,
    RequestPoisoned,
    ServiceUnavailable,
)
from tests.fakes.router_mesh import Got, RouterMesh, eventually, run_mesh

PROMPT = "Once upon a time there was a small model that lived in a cache."
STREAMS = 32
COUNT = 80
SLOW = {"step_s": 0.01}


class Once:
    """Does something when a stream has received `after` ids, once."""

    def __init__(self, act: Callable[[], None], *, after: int = 20) -> None:
        self.done = False
        self._act = act
        self._after = after

    def __call__(self, got: Got) -> None:
        if not self.done and len(got.ids.get(0, ())) >= self._after:
            self.done = True
            self._act()


async def many(mesh: RouterMesh, watch: Once) -> None:
    """Run many streams; every one must get what an uninterrupted one would."""
    prompts = [f"{PROMPT} {index}" for index in range(STREAMS)]
    streams = (mesh.generate(prompt, COUNT, watch=watch) for prompt in prompts)
    results = await asyncio.gather(*streams)
    assert watch.done
    for prompt, got in zip(prompts, results, strict=True):
        assert got.text == mesh.text.output(prompt, COUNT)
        assert got.ids[0] == mesh.text.output_ids(prompt, COUNT)
        assert got.finishes[0].usage.completion_tokens == COUNT
    await mesh.until_nothing_is_held()


async def test_links_to_workers_are_cut_and_no_client_notices(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape=SLOW) as mesh:
        await many(mesh, Once(mesh.worker_proxies[0].cut))


async def test_all_links_to_workers_are_cut_and_no_client_notices(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape=SLOW) as mesh:

        def cut() -> None:
            for proxy in mesh.worker_proxies:
                proxy.cut()

        await many(mesh, Once(cut))


async def test_a_replica_dies_and_no_client_notices(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape={**SLOW, "dp": 2}, workers=1) as mesh:
        await many(mesh, Once(lambda: mesh.workers[0].restart_replica(0)))


async def test_a_worker_that_freezes_is_noticed_and_left(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape=SLOW) as mesh:
        await many(mesh, Once(mesh.worker_proxies[1].freeze))


@pytest.mark.parametrize("count", [1, 2])
async def test_a_detokenizer_is_lost_and_no_client_notices(model_dir: Path, count: int) -> None:
    async with run_mesh(model_dir, shape=SLOW, detokenizers=count) as mesh:
        await many(mesh, Once(mesh.detokenizers[0].cut))


async def test_a_tokenizer_is_lost_and_the_other_takes_over(model_dir: Path) -> None:
    async with run_mesh(model_dir, tokenizers=2) as mesh:
        mesh.tokenizers[0].freeze()
        mesh.tokenizers[0].cut()
        results = await asyncio.gather(*(mesh.generate(PROMPT) for _ in range(10)))
        assert {got.text for got in results} == {mesh.text.output(PROMPT, 16)}


async def test_a_prompt_at_a_tokenizer_that_freezes_is_tried_elsewhere(model_dir: Path) -> None:
    async with run_mesh(model_dir, tokenizers=2) as mesh:
        mesh.tokenizers[0].freeze()
        results = await asyncio.gather(*(mesh.generate(PROMPT) for _ in range(10)))
        assert {got.text for got in results} == {mesh.text.output(PROMPT, 16)}


@pytest.mark.parametrize("service", ["tokenizers", "detokenizers"])
async def test_a_text_service_that_is_away_is_a_typed_refusal(
    model_dir: Path, service: str
) -> None:
    async with run_mesh(model_dir, ready_wait_s=0.2) as mesh:
        (proxy,) = getattr(mesh, service)
        proxy.freeze()
        proxy.cut()
        with pytest.raises(ServiceUnavailable) as refusal:
            await mesh.generate(PROMPT)
        assert refusal.value.retry_after_s
        await mesh.until_nothing_is_held()


async def test_a_stream_waits_for_the_only_worker_to_come_back(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=1, shape=SLOW) as mesh:
        (worker,) = mesh.workers
        lost = asyncio.Event()
        stream = asyncio.create_task(mesh.generate(PROMPT, COUNT, watch=Once(lost.set)))
        await lost.wait()
        await worker.kill()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.shield(stream)
        await worker.restart()
        got = await stream
        assert got.text == mesh.text.output(PROMPT, COUNT)
        assert got.finishes[0].receipt.attempts == 2
        await mesh.until_nothing_is_held()


async def test_a_stream_that_nobody_takes_over_in_time_ends_unavailable(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=1, shape=SLOW, resume_wait_s=0.3) as mesh:
        stream = asyncio.create_task(mesh.generate(PROMPT, 4000))
        await eventually(lambda: mesh.running == 1)
        await mesh.workers[0].kill()
        with pytest.raises(NoReplicaReady):
            await stream
        await mesh.until_nothing_is_held()


async def test_a_stop_string_is_found_across_a_resume(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape=SLOW) as mesh:
        whole = mesh.text.output(PROMPT, 200)
        stop = whole[150:170]

        def cut() -> None:
            for proxy in (*mesh.worker_proxies, *mesh.detokenizers):
                proxy.cut()

        # Text of a stop string that has begun is held back, so the cut falls into it or near it.
        once = Once(cut, after=len(mesh.text.prompt_ids(whole[:150])) // 2)
        got = await mesh.generate(PROMPT, 200, stop=[stop], watch=once)
        assert once.done
        assert got.text == whole[: whole.index(stop)]
        assert got.finishes[0].stop_matched == stop


async def test_log_probabilities_line_up_over_deaths(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape=SLOW) as mesh:

        def cut() -> None:
            for proxy in (*mesh.worker_proxies, *mesh.detokenizers):
                proxy.cut()

        got = await mesh.generate(
            PROMPT, sampling={"max_tokens": COUNT, "logprobs": True}, watch=Once(cut)
        )
        assert [one.token_id for one in got.logprobs] == got.ids[0]
        assert got.ids[0] == mesh.text.output_ids(PROMPT, COUNT)


async def test_a_request_that_takes_down_two_replicas_is_not_tried_again(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=3) as mesh:
        for worker in mesh.workers:
            worker.paused = True

        async def poison() -> None:
            while True:
                for worker in mesh.workers:
                    if worker.running:
                        worker.restart_replica(0)
                await asyncio.sleep(0.01)

        poisoning = asyncio.create_task(poison())
        with pytest.raises(RequestPoisoned):
            await mesh.generate(PROMPT)
        poisoning.cancel()
        assert sum(len(worker.submits) for worker in mesh.workers) == 2
        await mesh.until_nothing_is_held()


async def test_a_connection_lost_before_the_first_token_leaves_no_second_run(
    model_dir: Path,
) -> None:
    async with run_mesh(model_dir) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        stream = asyncio.create_task(mesh.generate(PROMPT))
        await eventually(lambda: mesh.running == 1)
        first = next(index for index, worker in enumerate(mesh.workers) if worker.running)
        mesh.worker_proxies[first].cut()
        await eventually(lambda: sum(len(worker.submits) for worker in mesh.workers) == 2)
        # The first attempt is fenced: its worker gave it up before the second one runs.
        await eventually(lambda: mesh.running == 1)
        for worker in mesh.workers:
            worker.paused = False
        got = await stream
        assert got.text == mesh.text.output(PROMPT, 16)
        assert got.finishes[0].receipt.attempts == 2


async def test_a_full_replica_is_no_failed_one(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=2) as mesh:
        for _ in range(5):
            mesh.workers[0].refuse = [QueueFull("full")]
            got = await mesh.generate(PROMPT)
            assert got.text == mesh.text.output(PROMPT, 16)
        for worker in mesh.workers:
            worker.refuse = [QueueFull("full")] * 10
        with pytest.raises(QueueFull) as refusal:
            await mesh.generate(PROMPT)
        assert refusal.value.retry_after_s
        for worker in mesh.workers:
            worker.refuse = []
        # Capacity answers opened nothing: the very next request is served.
        got = await mesh.generate(PROMPT)
        assert got.text == mesh.text.output(PROMPT, 16)


async def test_groups_at_dead_addresses_delay_nobody(model_dir: Path) -> None:
    # One port refuses, one accepts connections and says nothing, one address leads nowhere.
    async with asyncio.timeout(15), run_mesh(model_dir, workers=1) as silent:
        silent.worker_proxies[0].freeze()
        dead = ("127.0.0.1:1", f"127.0.0.1:{silent.worker_proxies[0].port}", "192.0.2.1:9")
        async with run_mesh(model_dir, workers=1, extra_groups=dead) as mesh:
            results = await asyncio.gather(
                *(mesh.generate(PROMPT, timeout_s=2.0) for _ in range(10))
            )
            assert {got.text for got in results} == {mesh.text.output(PROMPT, 16)}
            await mesh.until_nothing_is_held()


async def test_a_removed_group_hands_its_streams_over(model_dir: Path) -> None:
    from radixmesh.router.v1 import fleet_service_pb2

    async with run_mesh(model_dir, shape=SLOW) as mesh:
        request = fleet_service_pb2.RemoveGroupRequest(group_id="g0")
        removals: list[asyncio.Future[object]] = []

        def remove() -> None:
            removals.append(asyncio.ensure_future(mesh.fleet.RemoveGroup(request)))

        await many(mesh, Once(remove))
        await asyncio.gather(*removals)


async def test_whatever_fails_is_said_in_types(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=1) as mesh:
        await mesh.workers[0].kill()
        await asyncio.sleep(0)
        with pytest.raises(MeshError) as refusal:
            await mesh.generate(PROMPT, timeout_s=1.0)
        assert refusal.value.reason in {"NO_REPLICA_READY", "DEADLINE_EXCEEDED"}


async def test_what_continues_is_drawn_as_it_was_asked_for(model_dir: Path) -> None:
    asked = SamplingParams(
        seed=5, temperature=0.5, top_p=1.0, max_tokens=COUNT, min_tokens=3,
        repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=-0.25,
        logit_bias=[LogitBias(token_id=7, bias=-100.0), LogitBias(token_id=9, bias=2.5)],
    )  # fmt: skip
    async with run_mesh(model_dir, workers=1, shape={**SLOW, "dp": 2}) as mesh:
        (worker,) = mesh.workers
        cut = Once(lambda: worker.restart_replica(worker.submits[0].dp_rank))
        got = await mesh.generate(PROMPT, COUNT, sampling=asked, watch=cut)
        first, second = worker.submits
    assert got.ids[0] == mesh.text.output_ids(PROMPT, COUNT)
    assert first.sampling == second.sampling == asked
    # The worker counts these as output, and the prompt is what it was.
    assert first.prompt_ids == second.prompt_ids
    journal = unpack_ids(second.output_ids).tolist()
    assert len(journal) >= 20
    assert journal == got.ids[0][: len(journal)]
