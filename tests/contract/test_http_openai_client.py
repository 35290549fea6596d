"""The official OpenAI client against the HTTP edge, over a real socket."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
import uvicorn
from prometheus_client import CollectorRegistry

from radixmesh.errors import GroupLost, QueueFull
from router.edge.http import HttpLimits, build_http
from router.request import Delta, Sampling, TokenLogprob
from tests.fakes.pipeline import HANG, ScriptedPipeline, Step, finish, words

USER: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(pipeline: ScriptedPipeline, api_key: str = "k") -> AsyncGenerator[str, None]:
    app = build_http(
        pipeline,
        ready=lambda: True,
        registry=CollectorRegistry(),
        limits=HttpLimits(api_key=api_key),
    )
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    listening = socket.create_server(("127.0.0.1", 0))  # callers wait in its backlog
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        finally:
            server.should_exit = True
            await running


@asynccontextmanager
async def client(
    pipeline: ScriptedPipeline, key: str = "k"
) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with (
        served(pipeline) as url,
        openai.AsyncOpenAI(api_key=key, base_url=url, max_retries=0) as calls,
    ):
        yield calls


async def test_a_chat_is_understood() -> None:
    async with client(ScriptedPipeline(words("Hel|lo"))) as calls:
        answer = await calls.chat.completions.create(
            model="tiny", messages=USER, max_completion_tokens=5, seed=1, temperature=0
        )
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 32


async def test_a_streamed_chat_is_understood() -> None:
    async with client(ScriptedPipeline(words("Hel|lo"))) as calls:
        stream = await calls.chat.completions.create(
            model="tiny", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "Hello"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2


async def test_a_completion_with_logprobs_is_understood() -> None:
    script: list[Step] = [Delta(0, "ab", b"", (TokenLogprob(1, b"ab", -0.5),)), finish()]
    async with client(ScriptedPipeline(script)) as calls:
        answer = await calls.completions.create(model="tiny", prompt="p", logprobs=1)
        chat = await calls.chat.completions.create(model="tiny", messages=USER, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["ab"]
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert chat.choices[0].logprobs.content[0].logprob == -0.5


async def test_penalties_and_bias_of_the_client_arrive() -> None:
    pipeline = ScriptedPipeline(words("a"))
    asked = {"presence_penalty": 0.5, "frequency_penalty": -1.0, "logit_bias": {"7": -100}}
    async with client(pipeline) as calls:
        await calls.chat.completions.create(model="tiny", messages=USER, **asked)  # type: ignore[call-overload]
        await calls.completions.create(model="tiny", prompt="p", **asked)  # type: ignore[call-overload]
        with pytest.raises(openai.BadRequestError) as refused:
            await calls.completions.create(model="tiny", prompt="p", logit_bias={"7": 101})
    wanted = Sampling(presence_penalty=0.5, frequency_penalty=-1.0, logit_bias=((7, -100.0),))
    assert [request.sampling for request in pipeline.requests] == [wanted, wanted]
    assert refused.value.param == "logit_bias"


async def test_models_are_understood() -> None:
    async with client(ScriptedPipeline()) as calls:
        listed = await calls.models.list()
        named = await calls.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError):
            await calls.models.retrieve("other")
    assert [model.id for model in listed.data] == [named.id] == ["tiny"]


async def test_errors_are_understood() -> None:
    async with client(ScriptedPipeline([QueueFull("full")])) as calls:
        with pytest.raises(openai.RateLimitError) as full:
            await calls.chat.completions.create(model="tiny", messages=USER)
        with pytest.raises(openai.BadRequestError) as unsupported:
            await calls.chat.completions.create(model="tiny", messages=USER, top_logprobs=3)
    assert full.value.code == "rate_limit_exceeded"
    assert unsupported.value.param == "top_logprobs"


async def test_a_wrong_key_is_understood() -> None:
    async with client(ScriptedPipeline(), key="other") as calls:
        with pytest.raises(openai.AuthenticationError):
            await calls.models.list()


async def test_an_error_in_a_stream_is_raised_where_it_is_read() -> None:
    async with client(ScriptedPipeline([Delta(0, "a", b""), GroupLost("lost")])) as calls:
        stream = await calls.chat.completions.create(model="tiny", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="lost"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_closed_connection_closes_its_request(*, streaming: bool) -> None:
    pipeline = ScriptedPipeline([Delta(0, "a", b""), HANG])
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": streaming}
    async with served(pipeline, api_key="") as url, httpx.AsyncClient() as calls:
        sending = asyncio.ensure_future(calls.post(url + "/chat/completions", json=body))
        await pipeline.hanging.wait()
        sending.cancel()
        async with asyncio.timeout(5):
            await pipeline.closed.wait()
    assert pipeline.open_count == 0
