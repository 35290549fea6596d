"""What a request may ask for, checked before any work is done for it.

Pure: knows ranges and limits; no tokenizer, no fleet, no wire.
"""

import random
from collections.abc import Iterator
from dataclasses import replace

from radixmesh.blocks import ID_BYTES, unpack_ids
from radixmesh.errors import (
    BadSampling,
    InvalidRequest,
    PromptTooLong,
    UnknownToken,
)
from router.request import ChatPrompt, GenerateRequest, Sampling, TextPrompt

MAX_CHOICES = 16
MAX_MESSAGES = 10_000
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 4096
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_LABEL_BYTES = 256
PRIORITY_BOUND = 100
SEED_BOUND = 1 << 64

_LABEL_RULE = f"has at most {MAX_LABEL_BYTES} bytes"


def check(request: GenerateRequest) -> None:
    """Check everything that can be checked without the prompt's ids.

    Raises:
        InvalidRequest: Something is out of range; `field` names it.
        BadSampling: A sampling parameter is.
    """
    for field, bad, rule in _faults(request):
        if bad:
            raise InvalidRequest(f"{field} {rule}", field=field)
    for field, bad, rule in _sampling_faults(request.sampling):
        if bad:
            raise BadSampling(f"{field} {rule}", field=f"sampling.{field}")


def _faults(request: GenerateRequest) -> Iterator[tuple[str, bool, str]]:
    prompt = request.prompt
    if isinstance(prompt, TextPrompt):
        yield "text", not prompt.text, "must not be empty"
        yield "text", not _is_text(prompt.text), "must be text"
    elif isinstance(prompt, ChatPrompt):
        yield "chat.messages", not prompt.messages, "must not be empty"
        many = len(prompt.messages) > MAX_MESSAGES
        yield "chat.messages", many, f"holds at most {MAX_MESSAGES} messages"
        turns = (part for turn in prompt.messages for part in (turn.role, turn.content))
        yield "chat.messages", not all(map(_is_text, turns)), "must be text"
    else:
        yield "token_ids", not prompt.ids, "must not be empty"
    stops = request.stop
    yield "stop", len(stops) > MAX_STOP_STRINGS, f"holds at most {MAX_STOP_STRINGS} strings"
    yield "stop", not all(stops), "must not hold an empty string"
    yield "stop", not all(map(_is_text, stops)), "must be text"
    too_long = any(len(stop.encode(errors="replace")) > MAX_STOP_BYTES for stop in stops)
    yield "stop", too_long, f"strings have at most {MAX_STOP_BYTES} bytes"
    choices = not 1 <= request.choices <= MAX_CHOICES
    yield "choice_count", choices, f"must be in [1, {MAX_CHOICES}]"
    priority = abs(request.priority) > PRIORITY_BOUND
    yield "priority", priority, f"must be in [-{PRIORITY_BOUND}, {PRIORITY_BOUND}]"
    for name in ("tenant", "cache_salt", "session", "hint_group", "model"):
        label: str = getattr(request, name)
        yield name, not _is_text(label), "must be text"
        yield name, len(label.encode(errors="replace")) > MAX_LABEL_BYTES, _LABEL_RULE


def _is_text(text: str) -> bool:
    """Whether it can be sent: JSON may hold halves of surrogate pairs, which are no text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _sampling_faults(sampling: Sampling) -> Iterator[tuple[str, bool, str]]:
    # Comparisons are written so that NaN is a fault.
    yield "temperature", not 0 <= sampling.temperature <= 100, "must be in [0, 100]"
    yield "top_p", not 0 < sampling.top_p <= 1, "must be in (0, 1]"
    yield "top_k", sampling.top_k < 0, "must not be negative"
    yield "min_p", not 0 <= sampling.min_p <= 1, "must be in [0, 1]"
    seed, limit = sampling.seed, sampling.max_tokens
    yield "seed", seed is not None and not 0 <= seed < SEED_BOUND, "must be in [0, 2**64)"
    yield "max_tokens", limit is not None and limit < 1, "must be at least 1"
    yield "min_tokens", sampling.min_tokens < 0, "must not be negative"
    above = limit is not None and sampling.min_tokens > limit
    yield "min_tokens", above, "must not be above max_tokens"
    many = len(sampling.stop_token_ids) > MAX_STOP_IDS
    yield "stop_token_ids", many, f"holds at most {MAX_STOP_IDS} ids"
    yield "repetition_penalty", not 0 < sampling.repetition_penalty <= 100, "must be in (0, 100]"
    yield "presence_penalty", not abs(sampling.presence_penalty) <= 2, "must be in [-2, 2]"
    yield "frequency_penalty", not abs(sampling.frequency_penalty) <= 2, "must be in [-2, 2]"
    many = len(sampling.logit_bias) > MAX_BIASES
    yield "logit_bias", many, f"holds at most {MAX_BIASES} ids"
    wide = not all(abs(bias) <= 100 for _, bias in sampling.logit_bias)
    yield "logit_bias", wide, "must hold numbers in [-100, 100]"


def check_ids(ids: bytes, *, vocab_size: int) -> None:
    """Check that a prompt has ids and that all are in the vocabulary.

    Args:
        ids: Little-endian uint32.
        vocab_size: Ids run from 0 to this, exclusive; 0 when not known.

    Raises:
        InvalidRequest: There is no id, or the bytes are no ids.
        UnknownToken: An id is outside the vocabulary.
    """
    if not ids or len(ids) % ID_BYTES:
        raise InvalidRequest("the prompt has no ids", field="prompt")
    highest = max(unpack_ids(ids))
    if vocab_size and highest >= vocab_size:
        raise UnknownToken(
            f"id {highest} is outside the vocabulary of {vocab_size}",
            field="token_ids",
            vocab_size=vocab_size,
        )


def decide(
    sampling: Sampling,
    *,
    prompt_tokens: int,
    max_model_len: int,
    default_max_tokens: int,
    rng: random.Random,
) -> Sampling:
    """Return the sampling with `max_tokens` and `seed` decided.

    A default limit is capped by the context length; a limit that the client gave
    must fit.

    Raises:
        PromptTooLong: Prompt and wanted output exceed the context length.
        BadSampling: `min_tokens` is above what is left.
    """
    room = max_model_len - prompt_tokens
    wanted = sampling.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        raise PromptTooLong(
            f"{prompt_tokens} prompt ids and {wanted or 1} output ids exceed the context length "
            f"of {max_model_len}",
            field="prompt",
            prompt_tokens=prompt_tokens,
            max_model_len=max_model_len,
        )
    limit = min(default_max_tokens, room) if wanted is None else wanted
    # A minimum above the default raises the default, as far as the context allows.
    limit = max(limit, min(sampling.min_tokens, room))
    if sampling.min_tokens > limit:
        raise BadSampling(
            f"min_tokens is above the {limit} ids that are left in the context",
            field="sampling.min_tokens",
        )
    seed = rng.getrandbits(64) if sampling.seed is None else sampling.seed
    return replace(sampling, max_tokens=limit, seed=seed)
