"""What people's own programs get from `radixmesh up`: the official OpenAI client, grpcurl, buf.

The mesh is one group of two replicas of four ranks each, under a policy that is not the default.
"""

import asyncio
import json
import sys
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk, ChatCompletionUserMessageParam

from radixmesh.client import AsyncClient, AsyncFleetClient, Message, Sampling
from tests.fakes.up import RunningUp, running_up

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(120),
    pytest.mark.asyncio(loop_scope="module"),
]

TOKENS = 30
HELLO = "Tell me of the river, the bridge and the child who counts boats."
USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": HELLO}]
GENERATE = "radixmesh.router.v1.RouterService/Generate"
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[RunningUp, None]:
    folder = tmp_path_factory.mktemp("up")
    flags = ("--dp=2", "--pp=2", "--tp=2", "--policy=round_robin", "--stream-interval-ms=0")
    async with running_up(model_dir, folder, *flags, "--fake-decode-ms=2", groups=1) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def official(mesh: RunningUp) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai.AsyncOpenAI(base_url=f"{mesh.http}/v1", api_key="none") as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def said(mesh: RunningUp) -> str:
    """What the model says to HELLO, by the SDK."""
    async with AsyncClient(mesh.grpc) as client:
        chat = [Message("user", HELLO)]
        return (await client.complete(chat, sampling=Sampling(max_tokens=TOKENS))).text


async def test_every_rank_of_every_replica_runs(mesh: RunningUp) -> None:
    assert len(mesh.ranks(group=0)) == 8
    async with AsyncFleetClient(mesh.facts["fleet"]) as fleet:
        replicas = await fleet.list_replicas()
        explained = await fleet.explain_route("Once upon a time")
    assert [each.dp_rank for each in replicas] == [0, 1]
    assert {price.dp_rank for price in explained.candidates} == {0, 1}
    assert explained.policy == "round_robin"


async def test_the_policy_is_the_one_that_was_asked_for(mesh: RunningUp) -> None:
    async with AsyncClient(mesh.grpc) as client:
        receipts = [
            (await client.complete("hi", sampling=Sampling(max_tokens=1))).receipt for _ in range(4)
        ]
    assert [each.policy for each in receipts] == ["round_robin"] * 4
    places = [each.dp_rank for each in receipts]
    assert places in ([0, 1, 0, 1], [1, 0, 1, 0])


async def test_a_chat_with_everything_in_it(official: openai.AsyncOpenAI, said: str) -> None:
    stop = said[20:24]
    answer = await official.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=TOKENS,
        n=2,
        stop=["never said", stop],
        seed=7,
        temperature=0.5,
        top_p=0.9,
        logprobs=True,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.content == said[: said.index(stop)]
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(
        len(choice.logprobs.content or ()) for choice in answer.choices if choice.logprobs
    )


async def test_log_probabilities_spell_the_answer(official: openai.AsyncOpenAI, said: str) -> None:
    answer = await official.chat.completions.create(
        model="tiny", messages=USER, max_completion_tokens=TOKENS, logprobs=True
    )
    [choice] = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == TOKENS
    spelled = b"".join(bytes(one.bytes or ()) for one in choice.logprobs.content)
    assert spelled.decode(errors="replace") == choice.message.content == said
    assert all(one.logprob <= 0 for one in choice.logprobs.content)


async def test_a_streamed_chat_with_usage(official: openai.AsyncOpenAI, said: str) -> None:
    stream = await official.chat.completions.create(
        model="tiny",
        messages=USER,
        max_completion_tokens=TOKENS,
        n=2,
        logprobs=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in stream]
    texts: dict[int, str] = defaultdict(str)
    ends = {}
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert texts == {0: said, 1: said}
    assert ends == {0: "length", 1: "length"}
    assert len(chunks) > 10, "it is streamed"
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None
    assert usage.completion_tokens == 2 * TOKENS
    assert usage.total_tokens == usage.prompt_tokens + 2 * TOKENS
    assert usage.prompt_tokens_details is not None
    # The third chat with this prompt, on a replica that has it.
    assert usage.prompt_tokens_details.cached_tokens


async def test_a_completion_streamed_and_whole(official: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": HELLO, "max_tokens": TOKENS, "seed": 3}
    whole: Completion = await official.completions.create(**asked, n=2, logprobs=1)
    stream = await official.completions.create(**asked, stream=True, logprobs=0)
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in whole.choices] == [text, text]
    for choice in whole.choices:
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == text
        assert len(choice.logprobs.token_logprobs or ()) == TOKENS
    stopped = await official.completions.create(**asked, stop=text[15:18])
    assert stopped.choices[0].text == text[: text.index(text[15:18])]


async def test_models_version_and_browsers(mesh: RunningUp, official: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await official.models.list()] == ["tiny"]
    assert (await official.models.retrieve("tiny")).id == "tiny"
    async with httpx.AsyncClient(base_url=mesh.http) as calls:
        assert (await calls.get("/version")).json()["version"]
        assert (await calls.get("/readiness")).status_code == 200
        assert (await calls.get("/health")).status_code == 200
        assert "radixmesh_router_requests_total" in (await calls.get("/metrics")).text
        wants = {
            "origin": "https://example.org",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        answer = await calls.options("/v1/chat/completions", headers=wants)
    assert answer.headers["access-control-allow-origin"] == "*"
    assert "authorization" in answer.headers["access-control-allow-headers"]


async def command(*line: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out.decode()


async def test_the_programs_of_the_readme_run(mesh: RunningUp, model_dir: Path) -> None:
    blocks = (ROOT / "README.md").read_text().split("```python\n")[1:]
    programs = [block.split("```")[0] for block in blocks]
    assert len(programs) == 3
    here = {
        "http://127.0.0.1:30000": mesh.http,
        "127.0.0.1:30001": mesh.grpc,
        'Engine("smollm2"': f'Engine("{model_dir}", engine="fake"',
        "smollm2": "tiny",
    }
    for program in programs:
        for written, ours in here.items():
            program = program.replace(written, ours)
        assert (await command(sys.executable, "-c", program)).strip()


def messages(text: str) -> list[dict[str, Any]]:
    """JSON values, one after the other."""
    decoder = json.JSONDecoder()
    values, place = [], 0
    while (place := text.find("{", place)) >= 0:
        value, place = decoder.raw_decode(text, place)
        values.append(value)
    return values


@pytest.mark.parametrize("tool", ["grpcurl", "buf"])
async def test_command_lines_stream_by_reflection(mesh: RunningUp, said: str, tool: str) -> None:
    chat = {"messages": [{"role": "user", "content": HELLO}]}
    data = json.dumps({"chat": chat, "sampling": {"maxTokens": TOKENS}})
    if tool == "grpcurl":
        line = ["-plaintext", "-d", data, mesh.grpc, GENERATE]
    else:
        address = f"http://{mesh.grpc}/{GENERATE}"
        line = ["curl", "--protocol=grpc", "--http2-prior-knowledge", f"--data={data}", address]
    answer = messages(await command(str(BIN / tool), *line))
    assert "".join(message.get("delta", {}).get("text", "") for message in answer) == said
    assert len(answer) > 5, "it is streamed"
    assert answer[-1]["finish"]["receipt"]["policy"] == "round_robin"
