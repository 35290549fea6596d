"""What somebody asks of a group, and the checks that come before any work.

Pure: knows limits and ranges; knows neither the wire nor replicas. Whatever passes here
can't harm a replica: ids are in the vocabulary, lengths fit, numbers are in range.
"""

from array import array
from dataclasses import dataclass

from radixmesh.blocks import ID_BYTES, unpack_ids
from radixmesh.errors import (
    BadSampling,
    InvalidRequest,
    PromptTooLong,
    TokenizerMismatch,
    UnknownToken,
    UnsupportedParameter,
)
from worker.request import Sampling

MAX_STOP_IDS = 256
MAX_SALT_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request for one output.

    Attributes:
        prompt: Prompt ids, little-endian uint32.
        output: Ids that earlier attempts generated, likewise.
        dp_rank: The replica; None lets the group choose.
        timeout_ms: Time left until its deadline; 0 means none.
        fingerprint: Of the tokenizer that made the ids; empty skips the check.
    """

    prompt: bytes
    output: bytes = b""
    sampling: Sampling
    adapter: str = ""
    cache_salt: str = ""
    dp_rank: int | None = None
    priority: int = 0
    timeout_ms: int = 0
    fingerprint: str = ""

    @property
    def token_count(self) -> int:
        """Ids to compute or to find in the cache before the first new one."""
        return (len(self.prompt) + len(self.output)) // ID_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """What a group is and takes. The same for all its replicas, and for its whole life.

    `max_model_len` is what fits both the model's context and one replica's KV cache.
    """

    model: str
    weight_version: str
    fingerprint: str
    engine: str
    dp: int
    pp: int
    tp: int
    max_running: int
    max_waiting: int
    max_batched_tokens: int
    block_tokens: int
    kv_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]


def check(ask: Ask, info: GroupInfo) -> None:
    """Refuse what the group can't or mustn't do.

    Raises:
        TokenizerMismatch: The ids come from another tokenizer.
        UnsupportedParameter: An adapter is named; none is loaded.
        InvalidRequest: A run of ids is malformed, or nothing is left to generate.
        UnknownToken: An id is outside the vocabulary.
        BadSampling: A sampling parameter is out of range.
        PromptTooLong: Prompt and output exceed the context length or the KV cache.
    """
    if ask.fingerprint and ask.fingerprint != info.fingerprint:
        raise TokenizerMismatch(
            "the ids were made by another tokenizer than this group's",
            given=ask.fingerprint[:64],
            expected=info.fingerprint,
        )
    if ask.adapter:
        raise UnsupportedParameter("this group has no adapters", field="adapter")
    if len(ask.cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest("the cache salt is too long", field="cache_salt", limit=MAX_SALT_BYTES)
    _check_sampling(ask.sampling, info)
    prompt = _ids(ask.prompt, "prompt_ids")
    output = _ids(ask.output, "output_ids")
    if not prompt:
        raise InvalidRequest("a prompt has at least one id", field="prompt_ids")
    if len(output) >= ask.sampling.max_tokens:
        raise InvalidRequest("nothing is left to generate", field="output_ids")
    _check_length(len(prompt) + ask.sampling.max_tokens, info)
    _check_vocabulary(prompt, "prompt_ids", info)
    _check_vocabulary(output, "output_ids", info)


def _check_sampling(sampling: Sampling, info: GroupInfo) -> None:
    # Written so that NaN fails every one of them.
    ranges = (
        ("temperature", 0 <= sampling.temperature <= 100, "in [0, 100]"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("min_p", 0 <= sampling.min_p <= 1, "in [0, 1]"),
        ("max_tokens", sampling.max_tokens >= 1, "at least 1"),
        ("min_tokens", sampling.min_tokens <= sampling.max_tokens, "at most max_tokens"),
        ("stop_token_ids", len(sampling.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS}"),
    )
    for name, fine, wanted in ranges:
        if not fine:
            raise BadSampling(f"{name} must be {wanted}", field=f"sampling.{name}")
    if any(stop >= info.vocab_size for stop in sampling.stop_ids):
        raise UnknownToken("a stop id is outside the vocabulary", field="sampling.stop_token_ids")


def _ids(raw: bytes, name: str) -> "array[int]":
    try:
        return unpack_ids(raw)
    except ValueError:
        raise InvalidRequest("not a run of 4-byte ids", field=name) from None


def _check_vocabulary(ids: "array[int]", name: str, info: GroupInfo) -> None:
    if ids and max(ids) >= info.vocab_size:
        raise UnknownToken(
            "an id is outside the vocabulary", field=name, vocab_size=info.vocab_size
        )


def _check_length(wanted: int, info: GroupInfo) -> None:
    if wanted > info.max_model_len:
        raise PromptTooLong(
            f"prompt and max_tokens make {wanted} ids, a replica takes {info.max_model_len}",
            field="prompt_ids",
            limit=info.max_model_len,
            wanted=wanted,
        )
