"""The HTTP edge over a scripted pipeline: answers, streams, errors, and who is let in."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry, Counter

from radixmesh import errors
from radixmesh.errors import MeshError, PromptTooLong, QueueFull
from router.edge.admission import LINGER_S
from router.edge.http import HttpLimits, build_http
from router.request import Delta, FinishReason, TokenLogprob
from tests.fakes.pipeline import HANG, ScriptedPipeline, Served, Step, finish, words

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def edge(
    pipeline: ScriptedPipeline,
    *,
    ready: Callable[[], bool] = lambda: True,
    registry: CollectorRegistry | None = None,
    **limits: Any,
) -> FastAPI:
    return build_http(
        pipeline,
        ready=ready,
        registry=registry or CollectorRegistry(),
        limits=HttpLimits(**limits),
        clock=lambda: 1234.5,
    )


@asynccontextmanager
async def client(app: FastAPI) -> AsyncGenerator[httpx.AsyncClient, None]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://mesh") as calls:
        yield calls


def events(text: str) -> list[Any]:
    frames = text.split("\n\n")
    assert frames.pop() == ""
    data = [frame.removeprefix("data: ") for frame in frames]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


async def stream(pipeline: ScriptedPipeline, path: str, body: dict[str, Any]) -> list[Any]:
    async with client(edge(pipeline)) as calls:
        response = await calls.post(path, json=body | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_a_chat_answers_with_the_whole_text_and_its_counts() -> None:
    pipeline = ScriptedPipeline(words("Hel|lo"))
    async with client(edge(pipeline)) as calls:
        response = await calls.post("/v1/chat/completions", json=CHAT)
    body = response.json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body == {
        "object": "chat.completion",
        "created": 1234,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 40,
            "completion_tokens": 2,
            "total_tokens": 42,
            "prompt_tokens_details": {"cached_tokens": 32},
        },
    }


async def test_a_streamed_chat_opens_says_and_ends_each_output_once() -> None:
    *chunks, done = await stream(ScriptedPipeline(words("a|b")), "/v1/chat/completions", CHAT)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk and "radixmesh" not in chunk for chunk in chunks)


async def test_line_ends_of_unicode_do_not_break_a_streams_lines() -> None:
    text = "a\u2028b\u2029c\x85d"
    async with client(edge(ScriptedPipeline(words(text)))) as calls:
        answer = await calls.post("/v1/chat/completions", json=CHAT | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    said = [json.loads(line) for line in lines if line != "[DONE]"]
    assert said[1]["choices"][0]["delta"] == {"content": text}


async def test_counts_come_last_in_a_stream_that_asks_for_them() -> None:
    body = CHAT | {"stream_options": {"include_usage": True}}
    *chunks, last, done = await stream(ScriptedPipeline(words("a")), "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 41)


async def test_outputs_of_one_prompt_count_it_once() -> None:
    script: list[Step] = [
        Delta(1, "B", b""),
        Delta(0, "A", b""),
        finish(1, cached=40),
        finish(0, FinishReason.LENGTH, cached=8),
    ]
    async with client(edge(ScriptedPipeline(script))) as calls:
        body = (await calls.post("/v1/chat/completions", json=CHAT | {"n": 2})).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == ["A", "B"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "stop"]
    assert body["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 6,
        "total_tokens": 46,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


async def test_a_batch_of_prompts_numbers_its_outputs_through() -> None:
    pipeline = ScriptedPipeline(words("x|y"))
    async with client(edge(pipeline)) as calls:
        response = await calls.post("/v1/completions", json={"prompt": ["a", "b"]})
    body = response.json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "xy"),
        (1, "xy"),
    ]
    assert (body["model"], body["usage"]["prompt_tokens"]) == ("tiny", 80)
    assert pipeline.open_count == 0


async def test_one_failing_prompt_of_a_batch_ends_the_others() -> None:
    pipeline = ScriptedPipeline([HANG], other_scripts={"b": [QueueFull("full")]})
    async with client(edge(pipeline)) as calls:
        response = await calls.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
    assert response.status_code == 429
    assert pipeline.open_count == 0


async def test_logprobs_come_with_the_text_they_belong_to() -> None:
    logprobs = (TokenLogprob(5, b"\xe2\x82", -0.5), TokenLogprob(6, b"\xac", float("-inf")))
    script: list[Step] = [Delta(0, "€", b"", logprobs), finish()]
    *chunks, _ = await stream(
        ScriptedPipeline(script), "/v1/chat/completions", CHAT | {"logprobs": True}
    )
    content = chunks[1]["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xE2, 0x82], [0xAC]]
    assert [entry["logprob"] for entry in content] == [-0.5, -9999.0]

    async with client(edge(ScriptedPipeline(script))) as calls:
        body = (await calls.post("/v1/completions", json={"prompt": "p", "logprobs": 0})).json()
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [-0.5, -9999.0]
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1]


async def test_a_receipt_comes_only_when_asked_for() -> None:
    async with client(edge(ScriptedPipeline(words("a")))) as calls:
        headers = {"x-radixmesh-receipt": "1"}
        whole = await calls.post("/v1/chat/completions", json=CHAT, headers=headers)
        streamed = await calls.post(
            "/v1/chat/completions", json=CHAT | {"stream": True}, headers=headers
        )
        plain = await calls.post("/v1/chat/completions", json=CHAT)
    assert whole.json()["radixmesh"]["receipt"]["predicted_blocks"] == 2
    assert events(streamed.text)[-2]["radixmesh"]["receipt"]["group_id"] == "g0"
    assert "radixmesh" not in plain.json()


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, "in-body"),
        ({"x-radixmesh-session": "ours"}, "ours"),
        ({"x-smg-routing-key": "theirs"}, "theirs"),
        ({"x-smg-routing-key": "theirs", "x-radixmesh-session": "ours"}, "ours"),
    ],
)
async def test_a_session_is_named_by_a_header_or_by_openais_cache_key(
    headers: dict[str, str], session: str
) -> None:
    pipeline = ScriptedPipeline(words("a"))
    async with client(edge(pipeline)) as calls:
        body = CHAT | {"prompt_cache_key": "in-body"}
        answer = await calls.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert [request.session for request in pipeline.requests] == [session]


def _errors() -> Sequence[tuple[MeshError, int, str]]:
    return [
        (PromptTooLong("long", field="prompt"), 400, "invalid_request_error"),
        (errors.BadSampling("no", field="sampling.top_p"), 400, "invalid_request_error"),
        (errors.ModelNotServed("no"), 404, "invalid_request_error"),
        (QueueFull("full", retry_after_s=2.5), 429, "rate_limit_error"),
        (errors.NoReplicaReady("none"), 503, "server_error"),
        (errors.DeadlineExceeded("late"), 504, "server_error"),
        (errors.Cancelled("gone"), 499, "invalid_request_error"),
        (errors.RequestPoisoned("bad"), 500, "server_error"),
    ]


@pytest.mark.parametrize(("error", "status", "kind"), _errors())
@pytest.mark.parametrize("streaming", [False, True])
async def test_an_error_before_the_first_event_has_its_status(
    error: MeshError, status: int, kind: str, *, streaming: bool
) -> None:
    async with client(edge(ScriptedPipeline([error]))) as calls:
        response = await calls.post("/v1/chat/completions", json=CHAT | {"stream": streaming})
    assert response.status_code == status
    body = response.json()["error"]
    assert (body["message"], body["type"]) == (error.message, kind)
    assert body["param"] == (error.field.removeprefix("sampling.") or None)
    assert ("retry-after" in response.headers) == (error.retry_after_s is not None)


async def test_retry_hints_are_whole_seconds_and_milliseconds() -> None:
    async with client(edge(ScriptedPipeline([QueueFull("full", retry_after_s=2.5)]))) as calls:
        response = await calls.post("/v1/chat/completions", json=CHAT)
    assert response.headers["retry-after"] == "3"
    assert response.headers["retry-after-ms"] == "2500"


async def test_a_poisoned_request_is_not_to_be_repeated() -> None:
    async with client(edge(ScriptedPipeline([errors.RequestPoisoned("bad")]))) as calls:
        response = await calls.post("/v1/chat/completions", json=CHAT)
    assert response.headers["x-should-retry"] == "false"


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    script: list[Step] = [Delta(0, "a", b""), errors.GroupLost("lost")]
    frames = await stream(ScriptedPipeline(script), "/v1/chat/completions", CHAT)
    assert frames[-1]["error"]["code"] == "group_lost"
    assert "[DONE]" not in frames


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_bug_shows_an_id_and_nothing_else(
    caplog: pytest.LogCaptureFixture, *, streaming: bool
) -> None:
    async with client(edge(ScriptedPipeline([ValueError("secret")]))) as calls:
        response = await calls.post("/v1/chat/completions", json=CHAT | {"stream": streaming})
    message = response.json()["error"]["message"]
    assert response.status_code == 500
    assert "secret" not in response.text
    assert caplog.records[0].__dict__["error_id"] in message


async def test_an_output_without_an_end_is_a_bug_not_an_answer() -> None:
    async with client(edge(ScriptedPipeline([Delta(0, "a", b"")]))) as calls:
        response = await calls.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 500


async def test_a_bad_body_never_reaches_the_pipeline() -> None:
    pipeline = ScriptedPipeline(words("a"))
    async with client(edge(pipeline)) as calls:
        response = await calls.post("/v1/chat/completions", json=CHAT | {"tools": [{}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert pipeline.requests == []


async def test_a_body_over_the_limit_is_refused_declared_or_not() -> None:
    async def pieces() -> AsyncGenerator[bytes, None]:
        for _ in range(20):
            yield b"x" * 10

    pipeline = ScriptedPipeline(words("a"))
    async with client(edge(pipeline, max_body_bytes=100)) as calls:
        declared = await calls.post("/v1/chat/completions", content=b"x" * 101)
        chunked = await calls.post("/v1/chat/completions", content=pieces())
        fitting = await calls.post("/v1/chat/completions", content=b"x" * 100)
    assert [declared.status_code, chunked.status_code] == [413, 413]
    assert fitting.status_code == 400


async def test_the_key_guards_the_api_but_not_its_health() -> None:
    async with client(edge(ScriptedPipeline(words("a")), api_key="top")) as calls:
        missing = await calls.post("/v1/chat/completions", json=CHAT)
        wrong = await calls.get("/v1/models", headers={"authorization": "Bearer tox"})
        scheme = await calls.get("/v1/models", headers={"authorization": "Basic top"})
        right = await calls.get("/v1/models", headers={"authorization": "Bearer top"})
        health = await calls.get("/health")
    assert [missing.status_code, wrong.status_code, scheme.status_code] == [401, 401, 401]
    assert missing.json()["error"]["code"] == "invalid_api_key"
    assert [right.status_code, health.status_code] == [200, 200]


async def test_a_request_id_goes_in_and_out_if_it_is_clean() -> None:
    pipeline = ScriptedPipeline(words("a"))
    async with client(edge(pipeline)) as calls:
        url = "/v1/chat/completions"
        kept = await calls.post(url, json=CHAT, headers={"x-request-id": "trace-1"})
        made = await calls.post(url, json=CHAT, headers={"x-request-id": "a b"})
        refused = await calls.post(url, json={}, headers={"x-request-id": "trace-2"})
    assert kept.headers["x-request-id"] == "trace-1"
    assert pipeline.requests[0].request_id == "trace-1"
    assert made.headers["x-request-id"] == pipeline.requests[1].request_id != "a b"
    assert refused.headers["x-request-id"] == "trace-2"


async def test_an_answer_has_a_date() -> None:
    async with client(edge(ScriptedPipeline())) as calls:
        response = await calls.get("/health")
    assert response.headers["date"] == "Thu, 01 Jan 1970 00:20:34 GMT"


async def test_models_are_listed_and_named() -> None:
    served = [Served("tiny"), Served("org/big", 8192)]
    async with client(edge(ScriptedPipeline(served=served))) as calls:
        listed = (await calls.get("/v1/models")).json()
        named = (await calls.get("/v1/models/org/big")).json()
        unknown = await calls.get("/v1/models/else")
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/big"]
    assert (named["id"], named["max_model_len"]) == ("org/big", 8192)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


async def test_liveness_is_not_readiness() -> None:
    async with client(edge(ScriptedPipeline(), ready=lambda: False)) as calls:
        paths = ["/health", "/liveness", "/readiness"]
        assert [(await calls.get(path)).status_code for path in paths] == [200, 200, 503]
    async with client(edge(ScriptedPipeline())) as calls:
        assert (await calls.get("/readiness")).status_code == 200


async def test_metrics_are_those_of_the_registry() -> None:
    registry = CollectorRegistry()
    Counter("things", "What was counted.", registry=registry).inc(3)
    async with client(edge(ScriptedPipeline(), registry=registry)) as calls:
        assert "things_total 3.0" in (await calls.get("/metrics")).text


async def test_an_unknown_path_or_method_answers_in_the_same_shape() -> None:
    async with client(edge(ScriptedPipeline())) as calls:
        path = await calls.get("/v2/nothing")
        method = await calls.get("/v1/completions")
    assert (path.status_code, method.status_code) == (404, 405)
    assert all("message" in response.json()["error"] for response in (path, method))


async def test_a_browser_may_call_and_see_why_it_was_refused() -> None:
    async with client(edge(ScriptedPipeline(), api_key="k")) as calls:
        origin = {"origin": "http://page"}
        preflight = await calls.options(
            "/v1/chat/completions",
            headers=origin
            | {
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            },
        )
        refused = await calls.post("/v1/chat/completions", json=CHAT, headers=origin)
    assert preflight.status_code == 200
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"


async def _leave_while_waiting(app: FastAPI, body: dict[str, Any], hanging: asyncio.Event) -> None:
    """Send a request, wait until the pipeline hangs, and close the connection."""
    sent = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await hanging.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        del message

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "query_string": b"",
        "headers": [],
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
    }
    await app(scope, receive, send)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("script", [[HANG], [Delta(0, "a", b""), HANG]])
async def test_a_client_that_leaves_closes_its_request(
    script: list[Any], *, streaming: bool
) -> None:
    pipeline = ScriptedPipeline(script)
    await _leave_while_waiting(edge(pipeline), CHAT | {"stream": streaming}, pipeline.hanging)
    assert pipeline.closed.is_set()
    assert pipeline.open_count == 0


async def _do_not_read(app: FastAPI, *, leaves: bool) -> None:
    """Stream a chat and read nothing; leave then, or stay."""
    stuck = asyncio.Event()
    sent = [{"type": "http.request", "body": json.dumps(CHAT | {"stream": True}).encode()}]

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await (stuck if leaves else asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            stuck.set()
            await asyncio.Event().wait()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)


async def test_a_client_that_leaves_while_it_does_not_read_closes_its_request() -> None:
    pipeline = ScriptedPipeline([Delta(0, "a", b""), finish()])
    await _do_not_read(edge(pipeline), leaves=True)
    assert pipeline.closed.is_set()


async def test_a_client_that_does_not_read_does_not_stay_for_ever() -> None:
    pipeline = ScriptedPipeline([Delta(0, "a", b""), finish()])
    app = edge(pipeline, request_timeout_s=0.05 - LINGER_S)
    async with asyncio.timeout(5):
        await _do_not_read(app, leaves=False)
    assert pipeline.closed.is_set()


async def test_a_slow_body_is_given_up() -> None:
    app = edge(ScriptedPipeline(), body_timeout_s=0.01)
    messages: list[Any] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    assert messages[0]["status"] == 408


@pytest.mark.parametrize(
    ("field", "param"),
    [("choice_count", "n"), ("text", "prompt"), ("chat.messages", "messages"), ("tenant", "user")],
)
async def test_a_field_at_fault_is_named_as_in_this_api(field: str, param: str) -> None:
    async with client(edge(ScriptedPipeline([errors.InvalidRequest("no", field=field)]))) as calls:
        response = await calls.post("/v1/completions", json={"prompt": "p"})
    assert response.json()["error"]["param"] == param
