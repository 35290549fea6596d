"""Public protobuf <-> what the router is asked for. Knows both shapes and no behaviour."""

from radixmesh.blocks import pack_ids, unpack_ids
from radixmesh.common.v1 import generation_pb2, sampling_pb2
from radixmesh.errors import InvalidRequest, UnsupportedParameter
from radixmesh.router.v1 import router_service_pb2 as pb
from router.request import (
    ChatMessage,
    ChatPrompt,
    Delta,
    Event,
    Finish,
    GenerateRequest,
    IdsPrompt,
    Prompt,
    Receipt,
    Sampling,
    TextPrompt,
    TokenLogprob,
)


def to_request(
    message: pb.GenerateRequest, *, request_id: str = "", timeout_s: float | None = None
) -> GenerateRequest:
    """Return what a client asks for. Ranges are checked later, by the pipeline.

    Args:
        message: From the client.
        request_id: A label.
        timeout_s: Seconds until the call's deadline, or None.

    Raises:
        InvalidRequest: There is no prompt.
        UnsupportedParameter: Something is asked for that does not come back from here.
    """
    routing = message.routing
    return GenerateRequest(
        prompt=_to_prompt(message),
        request_id=request_id,
        model=message.model,
        sampling=to_sampling(message.sampling),
        stop=tuple(message.stop),
        include_stop=message.include_stop,
        choices=message.choice_count if message.HasField("choice_count") else 1,
        priority=message.priority,
        tenant=message.tenant,
        cache_salt=message.cache_salt,
        session=message.session,
        hint_group=routing.group_id,
        hint_dp_rank=routing.dp_rank if routing.HasField("dp_rank") else None,
        keep_special_tokens=message.keep_special_tokens,
        timeout_s=timeout_s,
    )


def _to_prompt(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text)
        case "chat":
            return _to_chat(message.chat)
        case "token_ids":
            return IdsPrompt(pack_ids(message.token_ids.ids))
        case _:
            raise InvalidRequest("a prompt is missing: text, chat or token_ids", field="prompt")


def _to_chat(chat: generation_pb2.ChatPrompt) -> ChatPrompt:
    messages = tuple(ChatMessage(turn.role, turn.content) for turn in chat.messages)
    opening = not chat.HasField("add_generation_prompt") or chat.add_generation_prompt
    return ChatPrompt(messages, add_generation_prompt=opening)


def to_sampling(message: sampling_pb2.SamplingParams) -> Sampling:
    """Return how ids are drawn, with the contract's defaults for what is unset.

    Raises:
        UnsupportedParameter: Alternatives or scores of the prompt are asked for.
    """
    for name in ("top_logprobs", "prompt_logprobs"):
        if getattr(message, name):
            raise UnsupportedParameter(f"{name} is not supported", field=f"sampling.{name}")
    penalty = message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
    return Sampling(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        logprobs=message.logprobs,
        repetition_penalty=penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((one.token_id, one.bias) for one in message.logit_bias),
    )


def to_response(event: Event) -> pb.GenerateResponse:
    """Return one message of the stream."""
    if isinstance(event, Delta):
        return pb.GenerateResponse(delta=_to_delta(event))
    return pb.GenerateResponse(finish=_to_finish(event))


def _to_delta(event: Delta) -> pb.Delta:
    return pb.Delta(
        choice=event.choice,
        text=event.text,
        token_ids=unpack_ids(event.ids),
        logprobs=[_to_logprob(one) for one in event.logprobs],
    )


def _to_logprob(one: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=one.token_id, bytes=one.raw, logprob=one.logprob)


def _to_finish(event: Finish) -> pb.Finish:
    usage = generation_pb2.Usage(
        prompt_tokens=event.usage.prompt_tokens,
        cached_tokens=event.usage.cached_tokens,
        completion_tokens=event.usage.completion_tokens,
    )
    return pb.Finish(
        choice=event.choice,
        finish_reason=generation_pb2.FinishReason.ValueType(event.reason),
        stop_matched=event.stop_matched,
        usage=usage,
        receipt=_to_receipt(event.receipt),
    )


def _to_receipt(receipt: Receipt) -> pb.RouteReceipt:
    return pb.RouteReceipt(
        group_id=receipt.group_id,
        dp_rank=receipt.dp_rank,
        block_tokens=receipt.block_tokens,
        predicted_blocks=receipt.predicted_blocks,
        actual_blocks=receipt.actual_blocks,
        prompt_blocks=receipt.prompt_blocks,
        predicted_wait_s=receipt.predicted_wait_s,
        actual_wait_s=receipt.actual_wait_s,
        policy=receipt.policy,
        attempts=receipt.attempts,
        seed=receipt.seed,
        last_group_id=receipt.last_group_id,
        last_dp_rank=receipt.last_dp_rank,
        possible_blocks=receipt.possible_blocks,
        held_blocks=receipt.held_blocks,
        view=pb.ViewState.ValueType(receipt.view),
        price_s=receipt.price_s,
        prefill_s=receipt.prefill_s,
        alpha=receipt.alpha,
        crowding_s=receipt.crowding_s,
        eviction_s=receipt.eviction_s,
    )
