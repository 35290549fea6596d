"""The tokenizer over a real channel: link, plain calls, health, limits, stop."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer

from radixmesh.blocks import unpack_ids
from radixmesh.errors import BY_REASON
from radixmesh.models import tokenizer_fingerprint
from radixmesh.rpc.status import from_rpc_error
from radixmesh.tokenizer.v1 import tokenizer_service_pb2 as pb
from radixmesh.tokenizer.v1.tokenizer_service_pb2_grpc import TokenizerServiceStub
from tests.fakes.model_dir import IM_END_ID, VOCAB_SIZE
from tests.fakes.text_router import TextRouter, app, channel_to, tokenizer_router
from tokenizer_svc.app import serve_tokenizer
from tokenizer_svc.settings import TokenizerSettings
from tokenizer_svc.tokenize.service import SERVICE_NAME

if TYPE_CHECKING:  # a name of the stub files alone
    from radixmesh.tokenizer.v1.tokenizer_service_pb2_grpc import TokenizerServiceAsyncStub

Router = TextRouter[pb.AttachRequest, pb.AttachResponse]


@asynccontextmanager
async def tokenizer_app(model_dir: Path, **flags: Any) -> AsyncGenerator[int]:
    settings = TokenizerSettings(model=str(model_dir), model_name="tiny", port=0, **flags)

    def serve(stop: asyncio.Event, on_ready: Any) -> Coroutine[Any, Any, None]:
        return serve_tokenizer(settings, stop, on_ready=on_ready)

    async with app(serve) as port:
        yield port


@pytest.fixture
async def port(model_dir: Path) -> AsyncGenerator[int]:
    async with tokenizer_app(model_dir, max_prompt_bytes=10_000) as port:
        yield port


@pytest.fixture
async def stub(port: int) -> AsyncGenerator["TokenizerServiceAsyncStub"]:
    async with channel_to(port) as channel:
        yield TokenizerServiceStub(channel)


def tokenizer_of(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def text(words: str) -> pb.Prompt:
    return pb.Prompt(text=words)


def chat(*turns: tuple[str, str]) -> pb.Prompt:
    prompt = pb.Prompt()
    for role, content in turns:
        prompt.chat.messages.add(role=role, content=content)
    return prompt


def submit(router: Router, *prompts: pb.Prompt) -> list[int]:
    """Open one entry per prompt, all in one frame."""
    frame = pb.AttachRequest()
    for prompt in prompts:
        frame.tokenize.add(entry_id=router.open(), prompt=prompt)
    router.send(frame)
    return [entry.entry_id for entry in frame.tokenize]


def results(router: Router) -> dict[int, list[int]]:
    return {
        result.entry_id: list(unpack_ids(result.token_ids))
        for frame in router.frames
        for result in frame.results
    }


async def test_the_first_frame_describes_the_tokenizer(port: int, model_dir: Path) -> None:
    async with tokenizer_router(port) as router:
        assert router.frames[0].info == pb.TokenizerInfo(
            model="tiny",
            fingerprint=tokenizer_fingerprint(model_dir),
            vocab_size=VOCAB_SIZE,
            has_chat_template=True,
            max_prompt_bytes=10_000,
        )


async def test_many_prompts_on_a_link_get_their_own_ids(port: int, model_dir: Path) -> None:
    words = [f"prompt number {place} 世界" for place in range(200)]
    async with tokenizer_router(port) as router:
        entries = submit(router, *map(text, words))
        await router.until(lambda: len(results(router)) == len(words))
        expected = [tokenizer_of(model_dir).encode(word).ids for word in words]
        assert [results(router)[entry] for entry in entries] == expected


async def test_a_conversation_is_rendered_and_encoded(port: int, model_dir: Path) -> None:
    async with tokenizer_router(port) as router:
        (entry,) = submit(router, chat(("user", "hi")))
        await router.until(lambda: entry in results(router))
        ids = results(router)[entry]
        assert tokenizer_of(model_dir).decode(ids, skip_special_tokens=False) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        assert IM_END_ID in ids


async def test_bad_prompts_fail_alone_with_their_reasons(port: int) -> None:
    """B57."""
    bad = {
        "PROMPT_TOO_LONG": text("x" * 10_001),
        "TEMPLATE_FAILED": chat(("pirate", "arr")),
        "INVALID_REQUEST": pb.Prompt(),
    }
    async with tokenizer_router(port) as router:
        entries = submit(router, text("before"), *bad.values(), text("after"))
        await router.until(
            lambda: len(results(router)) == 2 and all(map(router.error, entries[1:-1]))
        )
        errors = [router.error(entry) for entry in entries[1:-1]]
        assert [error and error.reason for error in errors] == list(bad)
        assert set(results(router)) == {entries[0], entries[-1]}


async def test_a_second_entry_of_the_same_number_is_ignored(port: int, model_dir: Path) -> None:
    async with tokenizer_router(port) as router:
        entry = router.open()
        frame = pb.AttachRequest()
        frame.tokenize.add(entry_id=entry, prompt=text("first"))
        frame.tokenize.add(entry_id=entry, prompt=text("second"))
        router.send(frame)
        (later,) = submit(router, text("later"))
        await router.until(lambda: {entry, later} <= set(results(router)))
        answers = [r.entry_id for frame in router.frames for r in frame.results]
        assert answers.count(entry) == 1
        assert results(router)[entry] == tokenizer_of(model_dir).encode("first").ids


async def test_a_full_queue_is_a_typed_refusal(model_dir: Path) -> None:
    async with (
        tokenizer_app(model_dir, max_waiting=1, threads=1, max_batch=1) as port,
        tokenizer_router(port) as router,
    ):
        entries = submit(router, *[text("the quick brown fox " * 400)] * 50)
        await router.until(
            lambda: all(entry in results(router) or router.error(entry) for entry in entries)
        )
        refused = [error for error in map(router.error, entries) if error]
        assert refused
        assert {error.reason for error in refused} == {"QUEUE_FULL"}
        assert all(error.retry_after_s for error in refused)


async def test_a_cancelled_prompt_gets_no_answer_and_harms_nobody(port: int) -> None:
    async with tokenizer_router(port) as router:
        cancelled = submit(router, *[text("gone " * 100)] * 100)
        for entry in cancelled:
            router.link.cancel(entry)
        (kept,) = submit(router, text("kept"))
        await router.until(lambda: kept in results(router))
        assert router.link.entries.keys() == {kept}


async def test_tokenize_and_detokenize_are_inverse(stub: "TokenizerServiceAsyncStub") -> None:
    words = "naïve café 世界 👩‍👩‍👧 <|im_end|>"
    there = await stub.Tokenize(pb.TokenizeRequest(prompt=text(words)))
    ids = there.token_ids
    back = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
    assert (await stub.Detokenize(back)).text == words
    skipping = await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))
    assert skipping.text == words.removesuffix("<|im_end|>")
    info = (await stub.GetTokenizer(pb.GetTokenizerRequest())).info
    assert there.fingerprint == info.fingerprint


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (pb.Prompt(), "INVALID_REQUEST"),
        (pb.Prompt(text="x" * 10_001), "PROMPT_TOO_LONG"),
        (chat(("pirate", "arr")), "TEMPLATE_FAILED"),
    ],
)
async def test_plain_errors_are_the_same_as_on_the_link(
    stub: "TokenizerServiceAsyncStub", prompt: pb.Prompt, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(pb.TokenizeRequest(prompt=prompt))
    assert type(from_rpc_error(caught.value)) is BY_REASON[reason]


async def test_an_id_outside_the_vocabulary_is_refused(stub: "TokenizerServiceAsyncStub") -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=[VOCAB_SIZE]))
    assert from_rpc_error(caught.value).reason == "UNKNOWN_TOKEN"


async def test_health_says_serving(port: int) -> None:
    async with channel_to(port) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for name in ("", SERVICE_NAME):
            answer = await check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_stop_answers_what_waits_and_then_closes(model_dir: Path) -> None:
    settings = TokenizerSettings(model=str(model_dir), port=0, threads=1, max_batch=1)
    async with asyncio.timeout(15), asyncio.TaskGroup() as tasks:
        stop = asyncio.Event()
        bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        serve = partial(serve_tokenizer, settings, stop, on_ready=bound.set_result)
        served = tasks.create_task(serve())
        async with tokenizer_router(await bound) as router:
            entries = submit(router, *[text("the quick brown fox " * 200)] * 20)
            await router.until(lambda: bool(results(router)))
            stop.set()
            await router.until(lambda: len(results(router)) == len(entries))
            await served
