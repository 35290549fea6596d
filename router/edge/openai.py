"""OpenAI's request bodies, read into `router.request`. Knows JSON names, ranges and defaults.

Knows no HTTP and no pipeline. A parameter that the mesh does not support is
refused by its name; only its neutral value passes. So is an unknown one:
nothing that a caller asks for is ignored.
"""

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import from_json

from radixmesh.errors import InvalidRequest, UnsupportedParameter
from router.request import (
    ChatMessage,
    ChatPrompt,
    GenerateRequest,
    IdsPrompt,
    Prompt,
    Sampling,
    TextPrompt,
)

MAX_STOPS: Final = 64
MAX_OUTPUTS: Final = 128
_SEED_MASK: Final = 2**64 - 1
_MAX_LABEL: Final = 512

# Documented parameters that do nothing here, each with the values that ask for nothing.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "store": (False,),
}
_NEUTRAL_CHAT: Final[Mapping[str, tuple[object, ...]]] = {
    **_NEUTRAL,
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_cache_key": ("",),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none",),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_NEUTRAL_COMPLETION: Final[Mapping[str, tuple[object, ...]]] = {
    **_NEUTRAL,
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
# What an answer of ours or of OpenAI has beside role and content, sent back as history.
_NEUTRAL_MESSAGE: Final[Mapping[str, tuple[object, ...]]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "refusal": ("",),
    "tool_call_id": (),
    "tool_calls": ([],),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """What one HTTP request asks for.

    Attributes:
        requests: One per prompt, all alike otherwise.
        stream: Whether deltas are wanted.
        include_usage: Whether a stream ends with a chunk of counts.
    """

    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool


def _read_stop(value: object) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise InvalidRequest("stop must be a string or a list of strings, none empty", field="stop")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings", field="stop", limit=MAX_STOPS)
    return tuple(stops)


def _read_messages(value: object) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages must be a list with at least one entry", field="messages")
    return tuple(_read_message(raw, f"messages[{index}]") for index, raw in enumerate(value))


def _read_message(raw: object, where: str) -> ChatMessage:
    if not isinstance(raw, dict):
        raise InvalidRequest(f"{where} must be an object", field=where)
    known = _supported(raw, {"role", "content"}, _NEUTRAL_MESSAGE, where + ".")
    role = known.get("role")
    if not isinstance(role, str) or not 0 < len(role) <= 64:
        raise InvalidRequest(f"{where}.role must be a short string", field=f"{where}.role")
    # `developer` is OpenAI's newer word for `system`; chat templates know only the latter.
    return ChatMessage(
        role="system" if role == "developer" else role,
        content=_read_content(known.get("content"), f"{where}.content"),
    )


def _read_content(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} must be a string or a list of parts", field=where)
    return "".join(_read_part(part, f"{where}[{index}]") for index, part in enumerate(value))


def _read_part(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type", field=where)
    if kind != "text":
        raise UnsupportedParameter(
            f"content parts of type {kind[:64]!r} are not supported, only text",
            field=f"{where}.type",
        )
    known = _supported(part, {"type", "text"}, {}, where + ".")
    text = known.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text must be a string", field=f"{where}.text")
    return text


def _read_prompts(value: object) -> tuple[Prompt, ...]:
    if isinstance(value, str):
        return (TextPrompt(value),)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, token ids or lists of token ids",
            field="prompt",
        )
    if isinstance(value[0], int):
        return (_read_ids(value),)
    return tuple(TextPrompt(item) if isinstance(item, str) else _read_ids(item) for item in value)


def _read_ids(value: object) -> IdsPrompt:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("a prompt must be a string or a list of token ids", field="prompt")
    try:
        return IdsPrompt(struct.pack(f"<{len(value)}I", *value))
    except struct.error as error:
        raise InvalidRequest("token ids must be integers below 2**32", field="prompt") from error


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool = False
    # Padding against traffic analysis; we send none.
    include_obfuscation: Literal[False] = False


class _Common(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    model: str = ""
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=16)
    stop: Annotated[tuple[str, ...], PlainValidator(_read_stop)] = ()
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    # Labels: they change nothing in an answer.
    user: str = Field("", max_length=_MAX_LABEL)
    safety_identifier: str = Field("", max_length=_MAX_LABEL)
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    # Beyond OpenAI, by the names that vLLM and SGLang use.
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    ignore_eos: bool = False
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field([], max_length=1024)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = Field("", max_length=_MAX_LABEL)
    priority: int = Field(0, ge=-100, le=100)

    def sampling(self, *, max_tokens: int | None, logprobs: bool) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),  # -1 is another word for off
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed & _SEED_MASK,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
        )

    def ask(self, prompts: tuple[Prompt, ...], sampling: Sampling, request_id: str) -> Ask:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream", field="stream_options")
        first = GenerateRequest(
            prompt=prompts[0],
            request_id=request_id,
            model=self.model,
            sampling=sampling,
            stop=self.stop,
            include_stop=self.include_stop_str_in_output,
            choices=self.n,
            priority=self.priority,
            tenant=self.user or self.safety_identifier,
            cache_salt=self.cache_salt,
            keep_special_tokens=not self.skip_special_tokens,
        )
        return Ask(
            requests=tuple(replace(first, prompt=prompt) for prompt in prompts),
            stream=self.stream,
            include_usage=self.stream_options is not None and self.stream_options.include_usage,
        )


class _Chat(_Common):
    messages: Annotated[tuple[ChatMessage, ...], PlainValidator(_read_messages)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    add_generation_prompt: bool = True


class _Completion(_Common):
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_read_prompts)]
    logprobs: int | None = Field(None, ge=0)


def read_chat(body: bytes, *, request_id: str = "") -> Ask:
    """Read the body of a chat completion.

    Raises:
        InvalidRequest: It is malformed, out of range, or asks for what is not supported;
            `field` names the parameter.
    """
    chat = _validate(_Chat, body, _NEUTRAL_CHAT)
    limits = {chat.max_completion_tokens, chat.max_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one", field="max_tokens"
        )
    sampling = chat.sampling(max_tokens=next(iter(limits), None), logprobs=chat.logprobs)
    prompt = ChatPrompt(chat.messages, add_generation_prompt=chat.add_generation_prompt)
    return chat.ask((prompt,), sampling, request_id)


def read_completion(body: bytes, *, request_id: str = "") -> Ask:
    """Read the body of a text completion; each of its prompts becomes a request.

    Raises:
        InvalidRequest: As in `read_chat`.
    """
    completion = _validate(_Completion, body, _NEUTRAL_COMPLETION)
    if completion.logprobs is not None and completion.logprobs > 1:
        raise UnsupportedParameter(
            "logprobs reports the chosen tokens only; give 0 or 1", field="logprobs"
        )
    if len(completion.prompt) * completion.n > MAX_OUTPUTS:
        raise InvalidRequest(
            f"at most {MAX_OUTPUTS} outputs a request (prompts x n)",
            field="prompt",
            limit=MAX_OUTPUTS,
        )
    sampling = completion.sampling(
        max_tokens=completion.max_tokens, logprobs=completion.logprobs is not None
    )
    return completion.ask(completion.prompt, sampling, request_id)


Body = TypeVar("Body", bound=_Common)


def _validate(kind: type[Body], body: bytes, neutral: Mapping[str, tuple[object, ...]]) -> Body:
    try:
        raw = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object")
    known = _supported(raw, kind.model_fields.keys(), neutral, "")
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])[:_MAX_LABEL]
        raise InvalidRequest(f"{name}: {first['msg']}", field=name) from error


def _supported(
    raw: dict[Any, Any],
    fields: Collection[str],
    neutral: Mapping[str, tuple[object, ...]],
    where: str,
) -> dict[str, Any]:
    """Return the supported parameters that are set; null means not set."""
    known = {}
    for name, value in raw.items():
        full = (where + name)[:_MAX_LABEL]
        if name in fields:
            if value is not None:
                known[name] = value
        elif name not in neutral:
            raise UnsupportedParameter(f"unknown parameter: {full}", field=full)
        elif value is not None and value not in neutral[name]:
            raise UnsupportedParameter(f"{full} is not supported", field=full)
    return known
