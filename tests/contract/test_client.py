"""Both flavours of the SDK against a router's services over a real channel."""

import asyncio
import inspect
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from radixmesh.client import (
    AsyncClient,
    AsyncFleetClient,
    Client,
    FinishReason,
    FleetClient,
    Message,
    Phase,
    Retry,
    Sampling,
    View,
)
from radixmesh.errors import (
    DeadlineExceeded,
    GroupLost,
    InternalError,
    InvalidRequest,
    PromptTooLong,
    QueueFull,
)
from radixmesh.router.v1 import fleet_service_pb2, router_service_pb2
from tests.fakes.router_service import HANG, FakeRouter, Step, delta, finish, serving

ANSWER: Sequence[Step] = (delta("Hel", 1), delta("lo", 2), finish())
FAST = Retry(attempts=3, first_pause_s=0.001, longest_pause_s=0.002)


class Flavour:
    """Calls either flavour of client as a coroutine."""

    def __init__(self, kind: type[Any], address: str, **options: Any) -> None:
        self._client = kind(address, retry=FAST, **options)
        self._is_async = kind.__name__.startswith("Async")

    async def __call__(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method; a stream comes back as a list."""
        bound = getattr(self._client, method)
        if not self._is_async:
            return await asyncio.to_thread(self._call, bound, *args, **options)
        if inspect.isasyncgenfunction(bound):
            return [item async for item in bound(*args, **options)]
        return await bound(*args, **options)

    async def first(self, method: str, count: int, *args: Any) -> list[Any]:
        """Take some items of a stream, then close it."""
        stream = getattr(self._client, method)(*args)
        if self._is_async:
            async with aclosing(stream):
                return [await anext(stream) for _ in range(count)]

        def take() -> list[Any]:
            items = [next(stream) for _ in range(count)]
            stream.close()
            return items

        return await asyncio.to_thread(take)

    async def close(self) -> None:
        if self._is_async:
            await self._client.close()
        else:
            self._client.close()

    @staticmethod
    def _call(bound: Any, *args: Any, **options: Any) -> Any:
        result = bound(*args, **options)
        return list(result) if inspect.isgenerator(result) else result


@asynccontextmanager
async def calling(
    kind: type[Any], router: FakeRouter, **options: Any
) -> AsyncGenerator[Flavour, None]:
    async with serving(router) as address:
        flavour = Flavour(kind, address, **options)
        try:
            yield flavour
        finally:
            await flavour.close()


both = pytest.mark.parametrize("kind", [Client, AsyncClient])
both_fleets = pytest.mark.parametrize("kind", [FleetClient, AsyncFleetClient])


@both
async def test_a_stream_tells_text_ids_and_its_end(kind: type[Any]) -> None:
    async with calling(kind, FakeRouter([ANSWER])) as call:
        chunks = await call("generate", "hi")
    assert [chunk.text for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk.token_ids for chunk in chunks] == [(1,), (2,), ()]
    assert chunks[-1].finish.reason is FinishReason.LENGTH
    assert chunks[-1].finish.usage.cached_tokens == 4
    assert chunks[-1].finish.receipt.predicted_blocks == 3


@both
async def test_complete_joins_every_output(kind: type[Any]) -> None:
    script = [delta("a", 1, choice=1), delta("b", 2), finish(1), delta("c", 3), finish(0)]
    async with calling(kind, FakeRouter([script])) as call:
        result = await call("complete", "hi", choices=2)
    assert [output.text for output in result.outputs] == ["bc", "a"]
    assert (result.text, result.finish_reason) == ("bc", FinishReason.LENGTH)
    assert result.outputs[0].token_ids == (2, 3)


@both
async def test_a_stream_without_an_end_is_not_taken_for_an_answer(kind: type[Any]) -> None:
    async with calling(kind, FakeRouter([[delta("a")]])) as call:
        with pytest.raises(InternalError):
            await call("complete", "hi")


@both
async def test_every_option_reaches_the_router(kind: type[Any]) -> None:
    router = FakeRouter([ANSWER])
    sampling = Sampling(
        temperature=0.0, top_p=0.5, top_k=3, min_p=0.25, seed=2**63, max_tokens=9, min_tokens=1,
        stop_token_ids=(4, 5), ignore_eos=True, logprobs=True, repetition_penalty=1.5,
        presence_penalty=0.5, frequency_penalty=-0.25, logit_bias=((7, -100.0), (8, 2.5)),
    )  # fmt: skip
    async with calling(kind, router, api_key="key") as call:
        await call(
            "complete",
            [Message("system", "s"), Message("user", "u")],
            model="m", sampling=sampling, stop=["x"], include_stop=True, choices=1, priority=-3,
            tenant="t", cache_salt="c", session="e", group_id="g", dp_rank=0,
            add_generation_prompt=False,
            keep_special_tokens=True, timeout_s=50.0, request_id="label",
        )  # fmt: skip
    request = router.requests[0]
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [
        ("system", "s"),
        ("user", "u"),
    ]
    assert request.chat.HasField("add_generation_prompt")
    assert request.sampling.HasField("temperature")
    assert (request.sampling.temperature, request.sampling.seed) == (0.0, 2**63)
    assert list(request.sampling.stop_token_ids) == [4, 5]
    assert request.sampling.repetition_penalty == 1.5
    assert (request.sampling.presence_penalty, request.sampling.frequency_penalty) == (0.5, -0.25)
    assert [(one.token_id, one.bias) for one in request.sampling.logit_bias] == [
        (7, -100.0),
        (8, 2.5),
    ]
    assert (request.model, list(request.stop), request.include_stop) == ("m", ["x"], True)
    assert (request.priority, request.tenant, request.cache_salt) == (-3, "t", "c")
    assert request.session == "e"
    assert (request.routing.group_id, request.routing.dp_rank) == ("g", 0)
    assert (request.routing.HasField("dp_rank"), request.choice_count) == (True, 1)
    assert request.keep_special_tokens
    assert router.metadata[0]["x-request-id"] == "label"
    assert router.metadata[0]["authorization"] == "Bearer key"
    assert 40 < router.deadlines[0] < 51  # gRPC rounds deadlines up


@both
@pytest.mark.parametrize(
    ("prompt", "which"),
    [("t", "text"), ([1, 2], "token_ids"), ([{"role": "user", "content": "u"}], "chat")],
)
async def test_a_prompt_is_text_ids_or_turns(kind: type[Any], prompt: Any, which: str) -> None:
    router = FakeRouter([ANSWER])
    async with calling(kind, router) as call:
        await call("complete", prompt)
    assert router.requests[0].WhichOneof("prompt") == which
    assert not router.requests[0].HasField("sampling")


@both
@pytest.mark.parametrize(
    "prompt", [[], [{"role": "user"}], [{"role": "user", "content": "x", "name": "y"}], "\ud800"]
)
async def test_a_prompt_without_a_shape_is_refused_here(kind: type[Any], prompt: Any) -> None:
    router = FakeRouter([ANSWER])
    async with calling(kind, router) as call:
        with pytest.raises(InvalidRequest):
            await call("complete", prompt)
        with pytest.raises(TypeError):
            await call("complete", "x", temperature=1)
    assert router.requests == []


@both
async def test_errors_come_back_as_their_class(kind: type[Any]) -> None:
    error = PromptTooLong("too long", field="prompt", limit=64)
    async with calling(kind, FakeRouter([[error]])) as call:
        with pytest.raises(PromptTooLong) as caught:
            await call("complete", "hi")
    assert (caught.value.field, caught.value.metadata) == ("prompt", {"limit": "64"})


@both
async def test_a_refusal_before_the_first_message_is_tried_again(kind: type[Any]) -> None:
    router = FakeRouter([[QueueFull("full", retry_after_s=0.001)], [GroupLost("lost")], ANSWER])
    async with calling(kind, router) as call:
        result = await call("complete", "hi")
    assert (result.text, len(router.requests)) == ("Hello", 3)
    assert len({labels["x-request-id"] for labels in router.metadata}) == 1


@both
async def test_tries_end(kind: type[Any]) -> None:
    router = FakeRouter([[QueueFull("full", retry_after_s=0.001)]])
    async with calling(kind, router) as call:
        with pytest.raises(QueueFull):
            await call("complete", "hi")
    assert len(router.requests) == FAST.attempts


@both
async def test_a_stream_that_said_something_is_never_tried_again(kind: type[Any]) -> None:
    router = FakeRouter([[delta("a"), GroupLost("lost")], ANSWER])
    async with calling(kind, router) as call:
        with pytest.raises(GroupLost):
            await call("complete", "hi")
    assert len(router.requests) == 1


@both
async def test_an_error_that_a_retry_cannot_mend_is_final(kind: type[Any]) -> None:
    router = FakeRouter([[PromptTooLong("long")], ANSWER])
    async with calling(kind, router) as call:
        with pytest.raises(PromptTooLong):
            await call("complete", "hi")
    assert len(router.requests) == 1


@both
async def test_closing_a_stream_cancels_it(kind: type[Any]) -> None:
    router = FakeRouter([[delta("a"), HANG]])
    async with calling(kind, router) as call:
        assert [chunk.text for chunk in await call.first("generate", 1, "hi")] == ["a"]
        async with asyncio.timeout(5):
            await router.ended.wait()


@both
async def test_a_deadline_ends_a_silent_stream(kind: type[Any]) -> None:
    router = FakeRouter([[delta("a"), HANG]])
    async with calling(kind, router) as call:
        with pytest.raises(DeadlineExceeded):
            await call("complete", "hi", timeout_s=0.2)


@both
async def test_models_are_listed_also_at_the_second_try(kind: type[Any]) -> None:
    router = FakeRouter(failures=[GroupLost("lost")])
    async with calling(kind, router) as call:
        models = await call("list_models")
    assert [(model.name, model.ready_replica_count) for model in models] == [("tiny", 2)]
    assert len(router.requests) == 2


@both_fleets
async def test_the_fleet_is_listed_priced_and_watched(kind: type[Any]) -> None:
    router = FakeRouter()
    async with calling(kind, router) as call:
        (replica,) = await call("list_replicas")
        explanation = await call("explain_route", "hi", model="m")
        first, second = await call.first("watch_fleet", 2)
        async with asyncio.timeout(5):
            await router.ended.wait()
    assert (replica.phase, replica.view, replica.hit_rate) == (Phase.READY, View.EXACT, 0.25)
    assert (explanation.policy, explanation.prompt_token_count) == ("price", 7)
    assert explanation.candidates[0].view is View.DEGRADED
    assert router.requests[1].request.text == "hi"
    assert (first, second) == ([replica], [])


@both_fleets
async def test_groups_are_added_drained_and_removed(kind: type[Any]) -> None:
    router = FakeRouter()
    async with calling(kind, router) as call:
        assert await call("add_group", "host:1") == "host:1"
        assert await call("add_group", "host:1", group_id="name") == "name"
        assert await call("drain_group", "name") == 3
        assert not router.requests[-1].HasField("deadline")
        assert await call("drain_group", "name", remove=True, within_s=1.5) == 3
        wished = router.requests[-1]
        assert (wished.remove_when_idle, wished.deadline.ToMilliseconds()) == (True, 1500)
        await call("remove_group", "name")
    assert router.requests[-1].group_id == "name"


@both_fleets
async def test_a_change_of_the_fleet_is_not_repeated(kind: type[Any]) -> None:
    router = FakeRouter(failures=[GroupLost("lost")])
    async with calling(kind, router) as call:
        with pytest.raises(GroupLost):
            await call("add_group", "host:1")
    assert len(router.requests) == 1


@pytest.mark.parametrize(
    ("service", "clients"),
    [
        (router_service_pb2.DESCRIPTOR.services_by_name["RouterService"], (Client, AsyncClient)),
        (
            fleet_service_pb2.DESCRIPTOR.services_by_name["FleetService"],
            (FleetClient, AsyncFleetClient),
        ),
    ],
)
def test_every_rpc_has_a_method_in_both_flavours(service: Any, clients: Sequence[Any]) -> None:
    for rpc in service.methods:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", rpc.name).lower()
        assert all(callable(getattr(kind, name, None)) for kind in clients), name
