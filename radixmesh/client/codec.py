"""Client values <-> protobuf, for both flavours of client. Knows shapes; calls nothing."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, Unpack

from google.protobuf.message import Message as ProtoMessage

from radixmesh.client.types import (
    CandidatePrice,
    Chunk,
    Explanation,
    Finish,
    FinishReason,
    Message,
    Model,
    Options,
    Output,
    Phase,
    Prompt,
    Receipt,
    Replica,
    Result,
    Sampling,
    TokenLogprob,
    Usage,
    View,
)
from radixmesh.common.v1 import generation_pb2, sampling_pb2
from radixmesh.errors import InternalError, InvalidRequest
from radixmesh.router.v1 import fleet_service_pb2, router_service_pb2

_REASONS = {
    generation_pb2.FINISH_REASON_STOP_TOKEN: FinishReason.STOP_TOKEN,
    generation_pb2.FINISH_REASON_STOP_STRING: FinishReason.STOP_STRING,
    generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}
_PHASES = {
    fleet_service_pb2.REPLICA_PHASE_CONNECTING: Phase.CONNECTING,
    fleet_service_pb2.REPLICA_PHASE_READY: Phase.READY,
    fleet_service_pb2.REPLICA_PHASE_DRAINING: Phase.DRAINING,
    fleet_service_pb2.REPLICA_PHASE_DOWN: Phase.DOWN,
}
_VIEWS = {
    router_service_pb2.VIEW_STATE_EXACT: View.EXACT,
    router_service_pb2.VIEW_STATE_DEGRADED: View.DEGRADED,
    router_service_pb2.VIEW_STATE_BLIND: View.BLIND,
}
# Options that the request message has under the same name.
_PLAIN = (
    "model",
    "stop",
    "include_stop",
    "priority",
    "tenant",
    "cache_salt",
    "session",
    "keep_special_tokens",
)

Value = TypeVar("Value")


def to_request(prompt: Prompt, **options: Unpack[Options]) -> router_service_pb2.GenerateRequest:
    """Return the message for a prompt and options.

    Raises:
        InvalidRequest: The prompt has no known shape, or a value does not fit its field.
        TypeError: There is no such option.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option: {min(unknown)}")
    try:
        request = router_service_pb2.GenerateRequest(
            **{name: options[name] for name in _PLAIN if name in options}  # type: ignore[literal-required]
        )
        _set_prompt(request, prompt, options)
        if "choices" in options:
            request.choice_count = options["choices"]
        if "sampling" in options:
            request.sampling.CopyFrom(_to_sampling(options["sampling"]))
        if "group_id" in options:
            request.routing.group_id = options["group_id"]
        if "dp_rank" in options:
            request.routing.dp_rank = options["dp_rank"]
    except (TypeError, ValueError) as error:  # protobuf: wrong type, out of range, bad text
        raise InvalidRequest(f"the request cannot be encoded: {error}") from error
    return request


def _set_prompt(
    request: router_service_pb2.GenerateRequest, prompt: Prompt, options: Options
) -> None:
    if isinstance(prompt, str):
        request.text = prompt
        return
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    if isinstance(prompt[0], int):
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
        return
    for turn in prompt:
        request.chat.messages.append(_to_message(turn))
    if "add_generation_prompt" in options:
        request.chat.add_generation_prompt = options["add_generation_prompt"]


def _to_message(turn: object) -> generation_pb2.ChatMessage:
    if isinstance(turn, Message):
        return generation_pb2.ChatMessage(role=turn.role, content=turn.content)
    if isinstance(turn, Mapping) and turn.keys() == {"role", "content"}:
        return generation_pb2.ChatMessage(role=turn["role"], content=turn["content"])
    raise InvalidRequest("a turn is a Message or has exactly role and content", field="messages")


def _to_sampling(sampling: Sampling) -> sampling_pb2.SamplingParams:
    given = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    given["logit_bias"] = [
        sampling_pb2.LogitBias(token_id=token_id, bias=bias)
        for token_id, bias in sampling.logit_bias
    ]
    return sampling_pb2.SamplingParams(
        **{name: value for name, value in given.items() if value is not None}
    )


def to_chunk(message: router_service_pb2.GenerateResponse) -> Chunk:
    """Return one message of a stream."""
    if message.HasField("finish"):
        end = message.finish
        finish = Finish(
            reason=_REASONS.get(end.finish_reason, FinishReason.UNKNOWN),
            stop_matched=end.stop_matched,
            usage=_plain(Usage, end.usage),
            receipt=_plain(Receipt, end.receipt, view=_VIEWS.get(end.receipt.view, View.UNKNOWN)),
        )
        return Chunk(choice=end.choice, finish=finish)
    delta = message.delta
    return Chunk(
        choice=delta.choice,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        logprobs=tuple(
            TokenLogprob(entry.token_id, entry.bytes, entry.logprob) for entry in delta.logprobs
        ),
    )


class Collector:
    """Puts the chunks of a stream together to a whole result."""

    def __init__(self) -> None:
        self._chunks: dict[int, list[Chunk]] = {}

    def take(self, chunk: Chunk) -> None:
        """Keep a chunk."""
        self._chunks.setdefault(chunk.choice, []).append(chunk)

    def result(self) -> Result:
        """Return all outputs in order.

        Raises:
            InternalError: The stream ended before an output did.
        """
        if not self._chunks:
            raise InternalError("the stream ended without an output")
        return Result(tuple(_to_output(self._chunks[choice]) for choice in sorted(self._chunks)))


def _to_output(chunks: list[Chunk]) -> Output:
    finish = chunks[-1].finish
    if finish is None:
        raise InternalError("the stream ended before an output did")
    return Output(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish_reason=finish.reason,
        stop_matched=finish.stop_matched,
        usage=finish.usage,
        receipt=finish.receipt,
    )


def to_models(message: router_service_pb2.ListModelsResponse) -> list[Model]:
    """Return the served models."""
    return [_plain(Model, model) for model in message.models]


def to_drain(
    group_id: str, *, remove: bool, within_s: float | None
) -> fleet_service_pb2.DrainGroupRequest:
    """Return the wish to drain a group."""
    request = fleet_service_pb2.DrainGroupRequest(group_id=group_id, remove_when_idle=remove)
    if within_s is not None:
        request.deadline.FromMilliseconds(round(within_s * 1000))
    return request


def to_replicas(replicas: Iterable[fleet_service_pb2.Replica]) -> list[Replica]:
    """Return replicas."""
    return [
        _plain(
            Replica,
            replica,
            phase=_PHASES.get(replica.phase, Phase.UNKNOWN),
            view=_VIEWS.get(replica.view, View.UNKNOWN),
        )
        for replica in replicas
    ]


def to_explanation(message: fleet_service_pb2.ExplainRouteResponse) -> Explanation:
    """Return the prices of a prompt."""
    candidates = tuple(
        _plain(
            CandidatePrice,
            candidate,
            phase=_PHASES.get(candidate.phase, Phase.UNKNOWN),
            view=_VIEWS.get(candidate.view, View.UNKNOWN),
        )
        for candidate in message.candidates
    )
    return Explanation(
        prompt_token_count=message.prompt_token_count,
        policy=message.policy,
        candidates=candidates,
    )


def _plain(kind: type[Value], message: ProtoMessage, **changed: Any) -> Value:
    """Return a dataclass whose fields are those of a message, but for the changed ones."""
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    copied = {name: getattr(message, name) for name in names if name not in changed}
    return kind(**copied, **changed)
