"""How a choice looks in each of OpenAI's two APIs. Knows JSON shapes; follows no request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from router.request import Delta, Finish, FinishReason, TokenLogprob

Json = dict[str, Any]

_LEAST_LOGPROB: Final = -9999.0  # JSON has no infinity


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
            "finish_reason": finish_reason(output.finish),
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
        return _text_choice(index, "".join(output.texts), shown, finish_reason(output.finish))


def finish_reason(finish: Finish | None) -> str:
    """Return OpenAI's word for why an output ended."""
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
