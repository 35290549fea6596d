"""The whole mesh over real channels: what a client gets when nothing dies, and what it may ask."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from radixmesh.common.v1 import generation_pb2
from radixmesh.errors import (
    DeadlineExceeded,
    MeshError,
    PromptTooLong,
    QueueFull,
)
from radixmesh.router.v1 import fleet_service_pb2
from radixmesh.router.v1 import router_service_pb2 as pb
from tests.fakes.router_mesh import Got, eventually, run_mesh

PROMPT = "Once upon a time there was a small model that lived in a cache."


def wanted(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


class _Left(Exception):
    """The client has had enough."""


async def test_a_client_gets_the_text_that_the_worker_chose(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        got = await mesh.generate(PROMPT, 40)
        assert got.text == mesh.text.output(PROMPT, 40)
        assert got.ids[0] == mesh.text.output_ids(PROMPT, 40)
        finish = got.finishes[0]
        assert finish.finish_reason == generation_pb2.FINISH_REASON_LENGTH
        assert finish.usage.prompt_tokens == len(mesh.text.prompt_ids(PROMPT))
        assert finish.usage.completion_tokens == 40
        assert finish.receipt.attempts == 1
        await mesh.until_nothing_is_held()


async def test_the_second_turn_lands_where_its_prefix_is_and_reuses_it(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=3) as mesh:
        first = (await mesh.generate(PROMPT)).finishes[0].receipt
        await mesh.until_cached(first.group_id, first.prompt_blocks)
        second = (await mesh.generate(f"{PROMPT} Every morning")).finishes[0]
        receipt = second.receipt
        assert receipt.group_id == first.group_id
        assert receipt.predicted_blocks == receipt.actual_blocks >= first.prompt_blocks > 0
        assert second.usage.cached_tokens == receipt.actual_blocks * receipt.block_tokens


async def test_chat_and_ids_are_prompts_too(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        chat = {"messages": [{"role": "user", "content": "Hello"}]}
        request = wanted(chat=chat, sampling={"max_tokens": 4})
        got = [message async for message in mesh.stub.Generate(request)]
        assert got[-1].finish.usage.prompt_tokens > len(mesh.text.prompt_ids("Hello"))
        ids = mesh.text.prompt_ids(PROMPT)
        request = wanted(token_ids={"ids": ids}, sampling={"max_tokens": 9})
        texts = [message.delta.text async for message in mesh.stub.Generate(request)]
        assert "".join(texts) == mesh.text.output(PROMPT, 9)


async def test_choices_come_from_one_replica_and_end_one_by_one(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        got = await mesh.generate(PROMPT, 12, choice_count=4)
        assert set(got.finishes) == {0, 1, 2, 3}
        assert len({finish.receipt.group_id for finish in got.finishes.values()}) == 1
        assert all(text == mesh.text.output(PROMPT, 12) for text in got.texts.values())
        await mesh.until_nothing_is_held()


async def test_log_probabilities_come_with_the_bytes_of_each_id(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        got = await mesh.generate(PROMPT, sampling={"max_tokens": 20, "logprobs": True})
        assert [one.token_id for one in got.logprobs] == got.ids[0]
        assert b"".join(one.bytes for one in got.logprobs).decode(errors="replace") == got.text


async def test_a_stop_string_ends_the_text_before_it_and_stops_the_worker(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        whole = mesh.text.output(PROMPT, 200)
        stop = whole[60:66]
        got = await mesh.generate(PROMPT, 200, stop=[stop])
        assert got.text == whole[: whole.index(stop)]
        assert got.finishes[0].stop_matched == stop
        assert got.finishes[0].finish_reason == generation_pb2.FINISH_REASON_STOP_STRING
        assert got.finishes[0].usage.completion_tokens == len(got.ids[0])
        await mesh.until_nothing_is_held()


async def test_requests_with_equal_outside_ids_are_strangers(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        label = (("x-request-id", "same"),)
        prompts = [PROMPT, "The capital of France is"]
        got = await asyncio.gather(
            *(mesh.generate(prompt, 30, metadata=label) for prompt in prompts)
        )
        assert [one.text for one in got] == [mesh.text.output(prompt, 30) for prompt in prompts]


async def test_a_prompt_that_does_not_fit_is_refused_before_any_work(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape={"max_model_len": 32}) as mesh:
        with pytest.raises(PromptTooLong):
            await mesh.generate(PROMPT, 30)
        assert not [submit for worker in mesh.workers for submit in worker.submits]


async def test_the_deadline_frees_everything(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        with pytest.raises(DeadlineExceeded):
            await mesh.generate(PROMPT, timeout_s=0.5)
        await mesh.until_nothing_is_held()


async def test_the_servers_own_deadline_is_typed(model_dir: Path) -> None:
    async with run_mesh(model_dir, request_timeout_s=0.3) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        with pytest.raises(DeadlineExceeded, match="the deadline passed"):
            await mesh.generate(PROMPT)
        await mesh.until_nothing_is_held()


async def test_a_client_that_leaves_during_prefill_frees_the_slot_at_once(model_dir: Path) -> None:
    async with run_mesh(model_dir) as mesh:
        for worker in mesh.workers:
            worker.paused = True
        client = asyncio.create_task(mesh.generate(PROMPT))
        await eventually(lambda: mesh.running == 1)
        client.cancel()
        await eventually(lambda: mesh.running == 0, timeout_s=1.0)
        await mesh.until_nothing_is_held()


async def test_a_cancel_storm_leaves_no_trace(model_dir: Path) -> None:
    chance = random.Random(5)
    async with run_mesh(model_dir, shape={"max_running": 512, "step_s": 0.005}) as mesh:
        await mesh.generate(PROMPT, 1)
        await mesh.until_nothing_is_held()
        tasks_at_rest = len(asyncio.all_tasks())
        expected = mesh.text.output(PROMPT, 60)

        async def survive() -> str:
            return (await mesh.generate(PROMPT, 60)).text

        async def leave(after_ids: int) -> None:
            def watch(got: Got) -> None:
                if len(got.ids[0]) >= after_ids:
                    raise _Left

            with pytest.raises(_Left):
                await mesh.generate(PROMPT, 2000, watch=watch)

        survivors = [asyncio.create_task(survive()) for _ in range(100)]
        leavers = [asyncio.create_task(leave(chance.randrange(1, 50))) for _ in range(100)]
        for leaver in leavers[::2]:
            # Half of those who leave do so at any moment, before the first token too.
            asyncio.get_running_loop().call_later(chance.uniform(0, 1.5), leaver.cancel)
        assert set(await asyncio.gather(*survivors)) == {expected}
        await asyncio.gather(*leavers, return_exceptions=True)
        assert all(leaver.cancelled() or not leaver.exception() for leaver in leavers)
        await mesh.until_nothing_is_held(2.0)
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks_at_rest, timeout_s=2.0)


async def test_no_more_streams_are_open_than_there_are_permits(model_dir: Path) -> None:
    async with run_mesh(model_dir, max_concurrent=3, max_queued=5) as mesh:
        most = 0

        def watch(_: Got) -> None:
            nonlocal most
            most = max(most, mesh.running)

        results = await asyncio.gather(
            *(mesh.generate(PROMPT, 60, watch=watch) for _ in range(20)), return_exceptions=True
        )
        refused = [one for one in results if isinstance(one, MeshError)]
        assert len(refused) == 12
        assert all(isinstance(one, QueueFull) and one.retry_after_s for one in refused)
        assert 1 <= most <= 3
        await mesh.until_nothing_is_held()


async def test_on_stop_running_streams_finish_and_new_ones_are_refused(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape={"step_s": 0.01}) as mesh:
        streams = [asyncio.create_task(mesh.generate(PROMPT, 80)) for _ in range(20)]
        await eventually(lambda: mesh.running == 20)
        mesh.stop.set()
        results = await asyncio.gather(*streams)
        assert {one.text for one in results} == {mesh.text.output(PROMPT, 80)}
        assert mesh.router is not None
        await mesh.router
        with pytest.raises(MeshError):
            await mesh.generate(PROMPT)


async def test_on_stop_http_streams_finish_too(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape={"step_s": 0.01}) as mesh:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 80, "stream": True}

        async def stream() -> str:
            text = ""
            async with (
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{mesh.ports.http}") as http,
                http.stream("POST", "/v1/completions", json=body) as answer,
            ):
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        text += "".join(choice["text"] for choice in chunk["choices"])
            return text

        streams = [asyncio.create_task(stream()) for _ in range(5)]
        await eventually(lambda: mesh.running == 5)
        mesh.stop.set()
        assert set(await asyncio.gather(*streams)) == {mesh.text.output(PROMPT, 80)}


async def test_explain_predicts_what_generate_then_does(model_dir: Path) -> None:
    async with run_mesh(model_dir, workers=3) as mesh:
        home = (await mesh.generate(PROMPT)).finishes[0].receipt.group_id
        request = pb.GenerateRequest(text=PROMPT)
        answer = await mesh.fleet.ExplainRoute(
            fleet_service_pb2.ExplainRouteRequest(request=request)
        )
        assert answer.prompt_token_count == len(mesh.text.prompt_ids(PROMPT))
        assert len(answer.candidates) == 3
        assert answer.candidates[0].group_id == home
        assert answer.candidates[0].matched_blocks == answer.candidates[0].prompt_blocks > 0


async def test_a_reader_that_pauses_gets_everything(model_dir: Path) -> None:
    async with run_mesh(model_dir, shape={"step_s": 0.001}) as mesh:
        call = mesh.stub.Generate(wanted(text=PROMPT, sampling={"max_tokens": 300}))
        messages = aiter(call)
        texts = [(await anext(messages)).delta.text]
        await eventually(lambda: mesh.running == 0)
        texts += [message.delta.text async for message in messages]
        assert "".join(texts) == mesh.text.output(PROMPT, 300)
        assert await call.code() == grpc.StatusCode.OK
