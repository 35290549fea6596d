"""The way of a request, with services in memory: what comes back, refusals, time, the client."""

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing

import pytest

from radixmesh.blocks import pack_ids
from radixmesh.errors import (
    BadSampling,
    DeadlineExceeded,
    InvalidRequest,
    LinkLost,
    MeshError,
    ModelNotServed,
    NoReplicaReady,
    PromptTooLong,
    QueueFull,
    SlowConsumer,
    TemplateFailed,
    UnknownToken,
)
from router.edge.admission import Admission
from router.fleet.breaker import Outcome
from router.pipeline import Pace, Pipeline
from router.request import (
    ChatMessage,
    ChatPrompt,
    Delta,
    FinishReason,
    GenerateRequest,
    IdsPrompt,
    Sampling,
    TextPrompt,
)
from tests.fakes.pipeline_mesh import PROMPT, Got, Mesh, ask, collect, failure, kill_serving_replica
from tests.fakes.small_mesh import expected_text


@pytest.fixture
def mesh() -> Mesh:
    return Mesh()


# The plain way


async def test_text_comes_back_with_usage_and_a_receipt(mesh: Mesh) -> None:
    for replica in mesh.fleet.replicas:
        replica.cached_tokens = 10
    got = await collect(mesh, ask())
    assert got.texts == {0: expected_text(PROMPT, 12)}
    assert got.ids[0] == list(got.texts[0].encode())
    finish = got.finishes[0]
    assert finish.reason is FinishReason.LENGTH
    usage = finish.usage
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (19, 10, 12)
    receipt = finish.receipt
    assert receipt.group_id in {"g0", "g1"}
    assert (receipt.prompt_blocks, receipt.predicted_blocks, receipt.actual_blocks) == (4, 2, 2)
    assert (receipt.predicted_wait_s, receipt.actual_wait_s) == (0.25, 0.125)
    assert (receipt.attempts, receipt.seed, receipt.policy) == (1, 7, "price")
    mesh.assert_nothing_is_held()


async def test_a_stop_id_ends_the_output_and_counts(mesh: Mesh) -> None:
    mesh.fleet.eos_after = 5
    got = await collect(mesh, ask())
    assert got.texts == {0: expected_text(PROMPT, 5)}
    assert got.finishes[0].reason is FinishReason.STOP_TOKEN
    assert got.finishes[0].usage.completion_tokens == 6
    assert len(got.ids[0]) == 6


async def test_a_stop_string_ends_the_output_and_stops_the_worker(mesh: Mesh) -> None:
    whole = expected_text(PROMPT, 40)
    stop = whole[20:23]
    end = whole.index(stop)
    got = await collect(mesh, ask(40, stop=(stop,)))
    assert got.texts == {0: whole[:end]}
    finish = got.finishes[0]
    assert (finish.reason, finish.stop_matched) == (FinishReason.STOP_STRING, stop)
    assert finish.usage.completion_tokens == end + 3
    assert mesh.fleet.cancelled == 1
    mesh.assert_nothing_is_held()


async def test_choices_share_a_replica_and_each_ends_once(mesh: Mesh) -> None:
    got = await collect(mesh, ask(6, choices=3))
    assert set(got.texts) == set(got.finishes) == {0, 1, 2}
    assert [spec.choice for spec in mesh.fleet.specs] == [0, 1, 2]
    assert len({finish.receipt.group_id for finish in got.finishes.values()}) == 1
    mesh.assert_nothing_is_held()


async def test_log_probabilities_line_up_with_ids(mesh: Mesh) -> None:
    request = ask(sampling=Sampling(max_tokens=8, seed=1, logprobs=True))
    mesh.script = lambda step: mesh.decoder.kill() if step == 6 else None
    got = await collect(mesh, request)
    assert [token for token, _, _ in got.logprobs] == got.ids[0]
    assert all(raw == bytes([token]) and lp == -token for token, raw, lp in got.logprobs)
    assert len(got.ids[0]) == 8


async def test_the_router_draws_a_seed_and_every_attempt_has_the_same(mesh: Mesh) -> None:
    mesh.script = kill_serving_replica(mesh, {5})
    got = await collect(mesh, ask(sampling=Sampling(max_tokens=8)))
    seeds = {spec.sampling.seed for spec in mesh.fleet.specs}
    assert seeds == {got.finishes[0].receipt.seed}
    assert len(mesh.fleet.specs) == 2


async def test_a_default_limit_is_capped_by_the_context_length(mesh: Mesh) -> None:
    mesh.fleet.eos_after = 0
    await collect(mesh, GenerateRequest(prompt=TextPrompt("x" * 500)))
    assert mesh.fleet.specs[0].sampling.max_tokens == 12


# Refusals before any work


@pytest.mark.parametrize(
    ("request_", "error", "name"),
    [
        (ask(sampling=Sampling(temperature=-1)), BadSampling, "sampling.temperature"),
        (ask(sampling=Sampling(temperature=float("nan"))), BadSampling, "sampling.temperature"),
        (ask(sampling=Sampling(top_p=0)), BadSampling, "sampling.top_p"),
        (ask(sampling=Sampling(top_k=-1)), BadSampling, "sampling.top_k"),
        (ask(sampling=Sampling(min_p=1.5)), BadSampling, "sampling.min_p"),
        (ask(sampling=Sampling(max_tokens=0)), BadSampling, "sampling.max_tokens"),
        (ask(sampling=Sampling(max_tokens=2, min_tokens=3)), BadSampling, "sampling.min_tokens"),
        *(
            (ask(sampling=sampling), BadSampling, f"sampling.{name}")
            for name, sampling in [
                ("repetition_penalty", Sampling(repetition_penalty=0)),
                ("repetition_penalty", Sampling(repetition_penalty=101)),
                ("presence_penalty", Sampling(presence_penalty=float("nan"))),
                ("frequency_penalty", Sampling(frequency_penalty=-2.5)),
                ("logit_bias", Sampling(logit_bias=((5, 101.0),))),
                ("logit_bias", Sampling(logit_bias=((5, float("nan")),))),
                ("logit_bias", Sampling(logit_bias=tuple((one, 1.0) for one in range(1025)))),
            ]
        ),
        (ask(choices=17), InvalidRequest, "choice_count"),
        (ask(stop=("",)), InvalidRequest, "stop"),
        (ask(priority=101), InvalidRequest, "priority"),
        (GenerateRequest(prompt=TextPrompt("")), InvalidRequest, "text"),
        (GenerateRequest(prompt=TextPrompt("half \ud800")), InvalidRequest, "text"),
        (ask(stop=("\udfff",)), InvalidRequest, "stop"),
        (
            GenerateRequest(prompt=ChatPrompt((ChatMessage("user", "x"),) * 10_001)),
            InvalidRequest,
            "chat.messages",
        ),
        (ask(cache_salt="\ud800"), InvalidRequest, "cache_salt"),
        (ask(tenant="x" * 257), InvalidRequest, "tenant"),
        (GenerateRequest(prompt=IdsPrompt(b"")), InvalidRequest, "token_ids"),
        (GenerateRequest(prompt=IdsPrompt(pack_ids([5, 128]))), UnknownToken, "token_ids"),
        (GenerateRequest(prompt=TextPrompt("x" * 512)), PromptTooLong, "prompt"),
        (ask(494), PromptTooLong, "prompt"),
        (ask(model="other"), ModelNotServed, ""),
    ],
)
async def test_a_bad_request_is_refused_before_any_work(
    mesh: Mesh, request_: GenerateRequest, error: type[MeshError], name: str
) -> None:
    refusal = await failure(mesh, request_)
    assert type(refusal) is error
    assert refusal.field == name
    assert not mesh.fleet.specs
    mesh.assert_nothing_is_held()


async def test_an_error_of_the_prompt_is_the_clients(mesh: Mesh) -> None:
    mesh.encoder.error = TemplateFailed("roles must alternate")
    assert isinstance(await failure(mesh, ask()), TemplateFailed)


async def test_no_served_model_is_a_matter_of_time(mesh: Mesh) -> None:
    mesh.fleet.served = []
    refusal = await failure(mesh, ask())
    assert isinstance(refusal, NoReplicaReady)
    assert refusal.retry_after_s


async def test_a_stop_string_is_a_good_end_for_the_replica(mesh: Mesh) -> None:
    stop = expected_text(PROMPT, 40)[20:23]
    await collect(mesh, ask(40, stop=(stop,)))
    assert mesh.fleet.outcomes[0][1] is Outcome.FINISHED


# Time


async def test_the_deadline_ends_a_request_that_generates(mesh: Mesh) -> None:
    mesh.fleet.step = lambda: None  # type: ignore[method-assign]
    refusal = await failure(mesh, ask(timeout_s=0.05))
    assert isinstance(refusal, DeadlineExceeded)
    mesh.assert_nothing_is_held()


async def test_the_deadline_ends_a_request_that_is_tokenized(mesh: Mesh) -> None:
    mesh.encoder.held = asyncio.Event()
    assert isinstance(await failure(mesh, ask(timeout_s=0.05)), DeadlineExceeded)
    assert mesh.encoder.timeouts[0] <= 0.05


async def test_the_deadline_ends_a_stream_that_waits_for_a_place(mesh: Mesh) -> None:
    def script(step: int) -> None:
        if step == 8:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica)

    mesh.script = script
    refusal = await failure(mesh, ask(40, timeout_s=0.1))
    assert isinstance(refusal, DeadlineExceeded)
    mesh.assert_nothing_is_held()


async def test_a_clients_deadline_does_not_exceed_the_servers(mesh: Mesh) -> None:
    mesh.encoder.held = asyncio.Event()
    pace = Pace(request_timeout_s=0.05)
    assert isinstance(await failure(mesh, ask(timeout_s=1e9), pace), DeadlineExceeded)


# The client


async def test_a_client_that_reads_nothing_has_text_merged(mesh: Mesh) -> None:
    async with aclosing(mesh.pipeline().generate(ask(50))) as events:
        first = asyncio.ensure_future(anext(events))
        while not first.done():
            mesh.step()
            await asyncio.sleep(0)
        for _ in range(200):
            mesh.step()
            await asyncio.sleep(0)
        head = await first
        rest = [event async for event in events]
    assert len(rest) == 2
    assert isinstance(head, Delta)
    assert isinstance(rest[0], Delta)
    assert head.text + rest[0].text == expected_text(PROMPT, 50)


async def test_a_client_that_falls_too_far_behind_is_ended(mesh: Mesh) -> None:
    pace = Pace(stream_interval_s=0, max_pending_bytes=100)
    async with aclosing(mesh.pipeline(pace).generate(ask(400))) as events:
        waiting = asyncio.ensure_future(anext(events))
        while not waiting.done():
            mesh.step()
            await asyncio.sleep(0)
        for _ in range(300):
            mesh.step()
            await asyncio.sleep(0)
        assert not mesh.fleet.entries, "the worker stopped at once"
        with pytest.raises(SlowConsumer):
            await anext(events)
    mesh.assert_nothing_is_held()


async def test_the_first_text_goes_at_once_and_later_text_is_merged(mesh: Mesh) -> None:
    pace = Pace(stream_interval_s=60.0)
    got = await collect(mesh, ask(40), pace)
    assert got.texts == {0: expected_text(PROMPT, 40)}
    assert got.events == 3, "the first text, all the rest, the finish"


async def test_a_permit_is_held_while_the_stream_is_open(mesh: Mesh) -> None:
    mesh.admission = Admission(max_concurrent=1, max_queued=0, queue_timeout_s=1)
    pipeline = mesh.pipeline()
    async with mesh.running():
        async with aclosing(pipeline.generate(ask(400))) as events:
            await anext(events)
            with pytest.raises(QueueFull):
                await anext(pipeline.generate(ask()))
        await anext(pipeline.generate(ask()))


async def run_until(mesh: Mesh, task: asyncio.Task[None], *, turns: int) -> bool:
    """Step for some turns of the loop; return whether the task ended by then."""
    for _ in range(turns):
        if task.done():
            return True
        mesh.step()
        await asyncio.sleep(0)
    return task.done()


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_cancel_at_any_moment_frees_everything(choices: int) -> None:
    # Every turn of the loop is a moment; deaths on the way visit the waits of a resume too.
    for turns in range(90):
        mesh = Mesh(admission=Admission(max_concurrent=1, max_queued=0, queue_timeout_s=1))
        mesh.script = deaths(mesh)

        async def consume(pipeline: Pipeline) -> None:
            async with aclosing(pipeline.generate(ask(10, choices=choices))) as events:
                async for _ in events:
                    pass

        task = asyncio.create_task(consume(mesh.pipeline()))
        ended = await run_until(mesh, task, turns=turns)
        task.cancel()
        await asyncio.wait([task])
        mesh.assert_nothing_is_held()
        if ended:
            assert task.exception() is None
            assert turns > 20
            return
    raise AssertionError("the request never ended")


def deaths(mesh: Mesh) -> Callable[[int], None]:
    def script(step: int) -> None:
        if step == 10:
            for replica in mesh.fleet.replicas:
                mesh.fleet.kill(replica, LinkLost)
        if step == 14:
            mesh.fleet.revive(mesh.fleet.replicas[1])
        if step == 20:
            mesh.decoder.kill()

    return script


async def test_a_cancel_storm_leaves_nothing(mesh: Mesh) -> None:
    chance = random.Random(3)
    pipeline = mesh.pipeline()

    async def consume() -> int:
        got = Got()
        async with aclosing(pipeline.generate(ask(chance.randrange(5, 40)))) as events:
            async for event in events:
                got.add(event)
        return len(got.texts[0])

    tasks = [asyncio.create_task(consume()) for _ in range(200)]
    doomed = {task: chance.randrange(60) for task in tasks[::2]}
    for turn in range(150):
        for task in (one for one, at in doomed.items() if at == turn):
            task.cancel()
        mesh.step()
        await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    mesh.assert_nothing_is_held()
    assert not pipeline._tasks
    survivors = [result for result in results[1::2] if isinstance(result, int)]
    assert len(survivors) == 100
    assert all(result >= 5 for result in survivors)


async def test_outside_ids_that_are_equal_disturb_nobody(mesh: Mesh) -> None:
    pipeline = mesh.pipeline()

    async def consume() -> str:
        got = Got()
        async with aclosing(pipeline.generate(ask(request_id="same"))) as events:
            async for event in events:
                got.add(event)
        return got.texts[0]

    async with mesh.running():
        texts = await asyncio.gather(consume(), consume())
    assert set(texts) == {expected_text(PROMPT, 12)}


async def test_explain_sends_nothing(mesh: Mesh) -> None:
    count, prices = await mesh.pipeline().explain(ask())
    assert count == 19
    assert not prices
    assert not mesh.fleet.specs
    mesh.assert_nothing_is_held()
