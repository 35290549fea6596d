"""OpenAI's request bodies, read into `router.request`. Knows JSON names, ranges and defaults.

Knows no HTTP and no pipeline.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import from_json

from radixmesh.errors import InvalidRequest, UnsupportedParameter
from router.checks import (
    MAX_CHOICES,
    MAX_LABEL_BYTES,
    MAX_STOP_IDS,
    MAX_STOP_STRINGS,
    PRIORITY_BOUND,
    SEED_BOUND,
)
from router.edge.parameters import MAX_NAME, NEUTRAL_CHAT, NEUTRAL_COMPLETION, supported
from router.edge.prompts import read_messages, read_prompts
from router.request import ChatMessage, ChatPrompt, GenerateRequest, Prompt, Sampling

MAX_OUTPUTS: Final = 128


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
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings", field="stop")
    return tuple(stops)


def _read_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict) or not all(map(_is_id, value)):
        raise InvalidRequest("logit_bias must map token ids to numbers", field="logit_bias")
    for bias in value.values():
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= 100:
            raise InvalidRequest("logit_bias must hold numbers in [-100, 100]", field="logit_bias")
    # Whatever else is wrong is said by `router.checks`, as to all edges.
    return tuple((int(name), float(bias)) for name, bias in value.items())


def _is_id(name: str) -> bool:
    # Short enough first: reading a long row of digits is dear.
    return len(name) <= 10 and name.isascii() and name.isdigit() and int(name) < 2**32


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
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[tuple[str, ...], PlainValidator(_read_stop)] = ()
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_read_logit_bias)] = ()
    seed: int | None = Field(None, ge=-(2**63), lt=SEED_BOUND)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    # Labels: they change nothing in an answer.
    user: str = Field("", max_length=MAX_LABEL_BYTES)
    safety_identifier: str = Field("", max_length=MAX_LABEL_BYTES)
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    # Beyond OpenAI, by the names that vLLM and SGLang use.
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    ignore_eos: bool = False
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field([], max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = Field("", max_length=MAX_LABEL_BYTES)
    prompt_cache_key: str = Field("", max_length=MAX_LABEL_BYTES)
    priority: int = Field(0, ge=-PRIORITY_BOUND, le=PRIORITY_BOUND)

    def sampling(self, *, max_tokens: int | None, logprobs: bool) -> Sampling:
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),  # -1 is another word for off
            min_p=self.min_p,
            seed=None if self.seed is None else self.seed % SEED_BOUND,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
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
            session=self.prompt_cache_key,
            keep_special_tokens=not self.skip_special_tokens,
        )
        return Ask(
            requests=tuple(replace(first, prompt=prompt) for prompt in prompts),
            stream=self.stream,
            include_usage=self.stream_options is not None and self.stream_options.include_usage,
        )


class _Chat(_Common):
    messages: Annotated[tuple[ChatMessage, ...], PlainValidator(read_messages)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    add_generation_prompt: bool = True


class _Completion(_Common):
    prompt: Annotated[tuple[Prompt, ...], PlainValidator(read_prompts)]
    logprobs: int | None = Field(None, ge=0)


def read_chat(body: bytes, *, request_id: str = "") -> Ask:
    """Read the body of a chat completion.

    Raises:
        InvalidRequest: It is malformed, out of range, or asks for what is not supported;
            `field` names the parameter.
    """
    chat = _validate(_Chat, body, NEUTRAL_CHAT)
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
    completion = _validate(_Completion, body, NEUTRAL_COMPLETION)
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
    known = supported(raw, kind.model_fields.keys(), neutral, "")
    try:
        return kind.model_validate(known)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])[:MAX_NAME]
        raise InvalidRequest(f"{name}: {first['msg']}", field=name) from error
