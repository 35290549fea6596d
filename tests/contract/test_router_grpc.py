"""The public gRPC API over a real channel, on a scripted pipeline."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from radixmesh.blocks import pack_ids
from radixmesh.common.v1 import generation_pb2
from radixmesh.errors import BadSampling, QueueFull
from radixmesh.router.v1 import router_service_pb2 as pb
from radixmesh.router.v1.router_service_pb2_grpc import (
    RouterServiceStub,
    add_RouterServiceServicer_to_server,
)
from radixmesh.rpc.server import Server
from radixmesh.rpc.status import from_rpc_error
from router.edge.admission import LINGER_S, ApiKey
from router.edge.grpc import SERVICE_NAME, RouterService
from router.fleet.ask import ModelInfo
from router.request import (
    ChatMessage,
    ChatPrompt,
    Delta,
    FinishReason,
    IdsPrompt,
    Sampling,
    TextPrompt,
    TokenLogprob,
)
from tests.fakes.pipeline import HANG, RECEIPT, ScriptedPipeline, finish, words

if TYPE_CHECKING:
    # The stub of asyncio channels exists for type checkers only.
    from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceAsyncStub


def wanted(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(**fields)


TEXT = wanted(text="hello")
MODEL = ModelInfo(
    name="tiny", max_model_len=99, fingerprint="f", ready_replicas=2, vocab_size=9, eos_ids=()
)


@asynccontextmanager
async def served(
    pipeline: Any, *, api_key: str = "", request_timeout_s: float = 30.0
) -> AsyncGenerator["RouterServiceAsyncStub"]:
    service = RouterService(pipeline, api_key=ApiKey(api_key), request_timeout_s=request_timeout_s)
    register = (SERVICE_NAME, lambda server: add_RouterServiceServicer_to_server(service, server))
    server = Server("127.0.0.1:0", [register])
    port = await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield RouterServiceStub(channel)
    finally:
        await server.stop()


async def responses(
    stub: "RouterServiceAsyncStub", request: pb.GenerateRequest = TEXT, **call: Any
) -> list[pb.GenerateResponse]:
    return [message async for message in stub.Generate(request, **call)]


async def refusal(
    stub: "RouterServiceAsyncStub", request: pb.GenerateRequest = TEXT, **call: Any
) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await responses(stub, request, **call)
    return caught.value


async def test_events_travel_whole() -> None:
    logprob = TokenLogprob(7, b"\xe2\x82", -0.5)
    script: Sequence[Any] = [
        Delta(1, "héllo", pack_ids([7]), (logprob,)),
        finish(1, FinishReason.STOP_STRING, cached=32, completion=3),
    ]
    async with served(ScriptedPipeline(script)) as stub:
        first, last = await responses(stub)
    assert first.delta.choice == last.finish.choice == 1
    assert (first.delta.text, list(first.delta.token_ids)) == ("héllo", [7])
    (one,) = first.delta.logprobs
    assert (one.token_id, one.bytes, one.logprob) == (7, b"\xe2\x82", -0.5)
    assert last.finish.finish_reason == generation_pb2.FINISH_REASON_STOP_STRING
    assert last.finish.usage.cached_tokens == 32
    receipt = last.finish.receipt
    for name in ("group_id", "dp_rank", "block_tokens", "predicted_blocks", "actual_blocks"):
        assert getattr(receipt, name) == getattr(RECEIPT, name)
    for name in ("prompt_blocks", "predicted_wait_s", "actual_wait_s", "policy", "attempts"):
        assert getattr(receipt, name) == getattr(RECEIPT, name)
    for name in ("seed", "last_group_id", "last_dp_rank"):
        assert getattr(receipt, name) == getattr(RECEIPT, name)


async def test_unset_means_the_default_and_zero_is_a_value() -> None:
    pipeline = ScriptedPipeline(words("a"))
    async with served(pipeline) as stub:
        await responses(stub)
        await responses(
            stub,
            wanted(
                chat={"messages": [{"role": "user", "content": "hi"}]},
                sampling={"temperature": 0, "top_p": 0.5, "seed": 0, "max_tokens": 3},
                choice_count=2,
                stop=["x"],
                include_stop=True,
                priority=-3,
                cache_salt="s",
                routing={"group_id": "g", "dp_rank": 0},
            ),
        )
        await responses(stub, wanted(token_ids={"ids": [1, 2]}))
    plain, full, ids = pipeline.requests
    assert plain.prompt == TextPrompt("hello")
    assert (plain.sampling.temperature, plain.sampling.top_p) == (1.0, 1.0)
    assert (plain.sampling.seed, plain.sampling.max_tokens, plain.choices) == (None, None, 1)
    assert plain.hint_dp_rank is None
    assert full.prompt == ChatPrompt((ChatMessage("user", "hi"),), add_generation_prompt=True)
    assert (full.sampling.temperature, full.sampling.seed) == (0.0, 0)
    assert (full.choices, full.stop, full.include_stop, full.priority) == (2, ("x",), True, -3)
    assert (full.cache_salt, full.hint_group, full.hint_dp_rank) == ("s", "g", 0)
    assert ids.prompt == IdsPrompt(pack_ids([1, 2]))


async def test_penalties_and_bias_arrive_and_unset_means_none() -> None:
    pipeline = ScriptedPipeline(words("a"))
    asked = {
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.25,
        "logit_bias": [{"token_id": 7, "bias": -100.0}],
    }
    async with served(pipeline) as stub:
        await responses(stub, wanted(text="x", sampling=asked))
        await responses(stub, wanted(text="x", sampling={"repetition_penalty": 0}))
        await responses(stub)
    full, zero, plain = (request.sampling for request in pipeline.requests)
    assert full == Sampling(
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias=((7, -100.0),),
    )
    assert zero.repetition_penalty == 0
    assert plain == Sampling()


@pytest.mark.parametrize("name", ["top_logprobs", "prompt_logprobs"])
async def test_what_does_not_come_back_is_refused_by_name(name: str) -> None:
    async with served(ScriptedPipeline(words("a"))) as stub:
        call = await refusal(stub, wanted(text="x", sampling={name: 1}))
    error = from_rpc_error(call)
    assert (error.reason, error.field) == ("UNSUPPORTED_PARAMETER", f"sampling.{name}")


async def test_a_request_without_a_prompt_names_the_field() -> None:
    async with served(ScriptedPipeline()) as stub:
        error = from_rpc_error(await refusal(stub, pb.GenerateRequest()))
    assert (error.reason, error.field) == ("INVALID_REQUEST", "prompt")


@pytest.mark.parametrize("after", [0, 2])
async def test_an_error_keeps_its_type_before_and_after_the_first_message(after: int) -> None:
    script: Sequence[Any] = [*words("a|b")[:after], QueueFull("full", retry_after_s=2.5, limit=3)]
    async with served(ScriptedPipeline(script)) as stub:
        call = await refusal(stub)
    assert call.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    status = rpc_status.from_call(call)
    assert status is not None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert any(detail.Unpack(retry) for detail in status.details)
    assert (info.reason, info.domain, dict(info.metadata)) == (
        "QUEUE_FULL",
        "radixmesh",
        {"limit": "3"},
    )
    assert retry.retry_delay.ToMilliseconds() == 2500


async def test_an_input_error_names_its_field() -> None:
    script = [BadSampling("top_p must be in (0, 1]", field="sampling.top_p")]
    async with served(ScriptedPipeline(script)) as stub:
        call = await refusal(stub)
    assert call.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert from_rpc_error(call).field == "sampling.top_p"


async def test_a_bug_shows_nothing_of_itself() -> None:
    async with served(ScriptedPipeline([ValueError("secret path /etc")])) as stub:
        call = await refusal(stub)
    assert call.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in (call.details() or "")


async def test_a_cancel_closes_the_generator() -> None:
    pipeline = ScriptedPipeline([*words("a")[:1], HANG])
    async with served(pipeline) as stub:
        call = stub.Generate(TEXT)
        await anext(aiter(call))
        await pipeline.hanging.wait()
        call.cancel()
        async with asyncio.timeout(1):
            await pipeline.closed.wait()
    assert pipeline.open_count == 0


async def test_a_client_that_vanishes_closes_the_generator() -> None:
    pipeline = ScriptedPipeline([*words("a")[:1], HANG])
    async with served(pipeline) as stub:
        call = stub.Generate(TEXT, timeout=0.2)
        await anext(aiter(call))
        async with asyncio.timeout(2):
            await pipeline.closed.wait()


async def test_a_client_that_does_not_read_does_not_stay_for_ever() -> None:
    flood = [Delta(0, "x" * 65536, b"")] * 2000
    pipeline = ScriptedPipeline([*flood, HANG])
    async with served(pipeline, request_timeout_s=0.2 - LINGER_S) as stub:
        call = stub.Generate(TEXT)
        await anext(aiter(call))
        async with asyncio.timeout(5):
            await pipeline.closed.wait()
        call.cancel()


async def test_the_calls_deadline_is_the_requests_within_the_servers() -> None:
    pipeline = ScriptedPipeline(words("a"))
    async with served(pipeline, request_timeout_s=20.0) as stub:
        await responses(stub, timeout=10)
        await responses(stub, timeout=500)
        await responses(stub)
    short, long, none = (request.timeout_s or 0 for request in pipeline.requests)
    assert 9 < short < 11
    assert long == none == 20.0


async def test_a_request_id_comes_back_and_a_missing_one_is_made() -> None:
    pipeline = ScriptedPipeline(words("a"))
    async with served(pipeline) as stub:
        for given in ((("x-request-id", "mine-1"),), ()):
            call = stub.Generate(TEXT, metadata=given)
            metadata = dict(await call.initial_metadata())
            assert metadata["x-request-id"]
            assert [message async for message in call]
    assert pipeline.requests[0].request_id == "mine-1"
    assert pipeline.requests[1].request_id not in {"", "mine-1"}


@pytest.mark.parametrize("given", [(), (("authorization", "Bearer wrong"),)])
async def test_without_the_key_nothing_is_done(given: tuple[tuple[str, str], ...]) -> None:
    pipeline = ScriptedPipeline(words("a"))
    async with served(pipeline, api_key="secret") as stub:
        call = await refusal(stub, metadata=given)
        with pytest.raises(grpc.aio.AioRpcError) as listing:
            await stub.ListModels(pb.ListModelsRequest(), metadata=given)
    assert call.code() == listing.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert from_rpc_error(call).reason == "BAD_API_KEY"
    assert not pipeline.requests


async def test_with_the_key_everything_is() -> None:
    async with served(ScriptedPipeline(words("a")), api_key="secret") as stub:
        assert await responses(stub, metadata=(("authorization", "Bearer secret"),))


class Listing(ScriptedPipeline):
    def models(self) -> Sequence[Any]:
        return [MODEL]


async def test_models_are_listed() -> None:
    async with served(Listing()) as stub:
        (model,) = (await stub.ListModels(pb.ListModelsRequest())).models
    assert (model.name, model.max_model_len) == ("tiny", 99)
    assert (model.fingerprint, model.ready_replica_count) == ("f", 2)
