"""OpenAI's answers and errors, made from what the pipeline says. Knows JSON shapes; no HTTP.

A `Style` knows how a choice looks in one of the two APIs; an `Answer` follows one
request through its events and gives its chunks, or its whole body at the end.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

from radixmesh.errors import InternalError, MeshError
from router.request import Delta, Event, Finish, FinishReason, TokenLogprob

Json = dict[str, Any]

STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "FAILED_PRECONDITION": 500,
    "ABORTED": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES: Final = {401: "authentication_error", 429: "rate_limit_error"}
# OpenAI's names, where it has one; existing programs match on them.
_CODES: Final = {
    "BAD_API_KEY": "invalid_api_key",
    "MODEL_NOT_SERVED": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "QUEUE_FULL": "rate_limit_exceeded",
}
# Fields of the domain that have another name in these APIs.
_PARAMS: Final = {"text": "prompt", "token_ids": "prompt", "choice_count": "n"}
_LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity


def status_of(error: MeshError) -> int:
    """Return the HTTP status of an error."""
    return STATUS.get(error.code, 500)


def error_body(error: MeshError, status: int) -> Json:
    """Return an error in OpenAI's shape."""
    fallback = "invalid_request_error" if status < 500 else "server_error"
    param = error.field.removeprefix("sampling.").removeprefix("chat.")
    param = _PARAMS.get(param, param)
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(status, fallback),
            "param": param or None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def error_headers(error: MeshError) -> dict[str, str]:
    """Return when to come again, and whether at all, in the headers that clients read."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.reason == "REQUEST_POISONED":
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat every 5xx otherwise
    return headers


@dataclass(slots=True)
class Output:
    """One output as far as it got."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None


class Style(Protocol):
    """How one of the APIs shows a choice."""

    prefix: str
    whole: str
    chunk: str

    def first(self, index: int) -> Json | None:
        """Return the choice that opens an output, if the API has one."""
        ...

    def delta(self, index: int, delta: Delta, offset: int) -> Json:
        """Return a choice with new text, which begins `offset` characters into the output."""
        ...

    def finish(self, index: int, reason: str) -> Json:
        """Return the choice that ends an output."""
        ...

    def all(self, index: int, output: Output, *, logprobs: bool) -> Json:
        """Return the choice of a whole answer."""
        ...


class ChatStyle:
    """`/v1/chat/completions`."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def first(self, index: int) -> Json:
        """Return the opening choice, which tells the role."""
        return _chunk_choice(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, delta: Delta, offset: int) -> Json:
        """Return a choice with new text."""
        del offset
        logprobs = _chat_logprobs(delta.logprobs) if delta.logprobs else None
        return _chunk_choice(index, {"content": delta.text}, logprobs)

    def finish(self, index: int, reason: str) -> Json:
        """Return the closing choice."""
        return _chunk_choice(index, {}, reason=reason)

    def all(self, index: int, output: Output, *, logprobs: bool) -> Json:
        """Return the choice of a whole answer."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(output.texts), "refusal": None},
            "logprobs": _chat_logprobs(output.logprobs) if logprobs else None,
            "finish_reason": _reason(output.finish),
        }


class CompletionStyle:
    """`/v1/completions`."""

    prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def first(self, index: int) -> None:
        """Return nothing: text needs no opening."""
        del index

    def delta(self, index: int, delta: Delta, offset: int) -> Json:
        """Return a choice with new text."""
        logprobs = _text_logprobs(delta.logprobs, offset) if delta.logprobs else None
        return _text_choice(index, delta.text, logprobs)

    def finish(self, index: int, reason: str) -> Json:
        """Return the closing choice."""
        return _text_choice(index, "", reason=reason)

    def all(self, index: int, output: Output, *, logprobs: bool) -> Json:
        """Return the choice of a whole answer."""
        shown = _text_logprobs(output.logprobs, 0) if logprobs else None
        return _text_choice(index, "".join(output.texts), shown, _reason(output.finish))


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of an answer share. `choices` is how many outputs there will be."""

    id: str
    created: int
    model: str
    choices: int
    include_usage: bool = False
    receipts: bool = False
    logprobs: bool = False


class Answer:
    """Follows one request: `take` every event, then `body`; or `chunks` for every event.

    Outputs are numbered through all prompts of the request; `choices_per_prompt` says
    which belong to one, because a prompt is counted once whatever its outputs.
    """

    def __init__(self, style: Style, head: Head, *, choices_per_prompt: int) -> None:
        self._style = style
        self._head = head
        self._per_prompt = choices_per_prompt
        self._outputs = [Output() for _ in range(head.choices)]
        self._opened: set[int] = set()
        self._offsets = [0] * head.choices

    def take(self, event: Event) -> None:
        """Keep an event for `body`."""
        output = self._outputs[event.choice]
        if isinstance(event, Finish):
            output.finish = event
        else:
            output.texts.append(event.text)
            output.logprobs.extend(event.logprobs)

    def body(self) -> Json:
        """Return the whole answer.

        Raises:
            InternalError: An output did not end.
        """
        finishes = self._finishes()
        choices = [
            self._style.all(index, output, logprobs=self._head.logprobs)
            for index, output in enumerate(self._outputs)
        ]
        whole = self._frame(self._style.whole, choices)
        whole["usage"] = self._usage(finishes)
        return self._with_receipts(whole, finishes)

    def chunks(self, event: Event) -> list[Json]:
        """Return the chunks that tell of an event."""
        index = event.choice
        made = []
        if index not in self._opened:
            self._opened.add(index)
            if (first := self._style.first(index)) is not None:
                made.append(self._chunk([first]))
        if isinstance(event, Finish):
            self._outputs[index].finish = event
            made.append(self._chunk([self._style.finish(index, _reason(event))]))
        elif event.text or event.logprobs:
            made.append(self._chunk([self._style.delta(index, event, self._offsets[index])]))
            self._offsets[index] += len(event.text)
        return made

    def last(self) -> list[Json]:
        """Return the chunks after the last event: counts and receipts, where wanted.

        Raises:
            InternalError: An output did not end.
        """
        finishes = self._finishes()
        if not (self._head.include_usage or self._head.receipts):
            return []
        chunk = self._chunk([])
        if self._head.include_usage:
            chunk["usage"] = self._usage(finishes)
        return [self._with_receipts(chunk, finishes)]

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._frame(self._style.chunk, choices)
        if self._head.include_usage:
            chunk["usage"] = None
        return chunk

    def _finishes(self) -> list[Finish]:
        finishes = [output.finish for output in self._outputs if output.finish is not None]
        if len(finishes) < len(self._outputs):
            raise InternalError("the pipeline ended before all outputs did")
        return finishes

    def _usage(self, finishes: Sequence[Finish]) -> Json:
        prompt = cached = 0
        for start in range(0, len(finishes), self._per_prompt):
            same = [finish.usage for finish in finishes[start : start + self._per_prompt]]
            prompt += same[0].prompt_tokens
            # Later outputs find the prompt in the cache because the first computed it.
            cached += min(usage.cached_tokens for usage in same)
        completion = sum(finish.usage.completion_tokens for finish in finishes)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _with_receipts(self, frame: Json, finishes: Iterable[Finish]) -> Json:
        if self._head.receipts:
            receipts = [asdict(finish.receipt) for finish in finishes]
            frame["radixmesh"] = (
                {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
            )
        return frame


def _reason(finish: Finish | None) -> str:
    return "length" if finish and finish.reason is FinishReason.LENGTH else "stop"


def _chunk_choice(
    index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _text_choice(
    index: int, text: str, logprobs: Json | None = None, reason: str | None = None
) -> Json:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB) if not math.isnan(logprob) else _LEAST_LOGPROB


def _chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json:
    content = [
        {
            "token": _text(entry),
            "logprob": _finite(entry.logprob),
            "bytes": list(entry.raw),
            "top_logprobs": [],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    tokens = [_text(entry) for entry in logprobs]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": None,
        "text_offset": offsets,
    }


def _text(entry: TokenLogprob) -> str:
    return entry.raw.decode("utf-8", errors="replace")
