"""What somebody asks of a group, what a group is, and the checks that come before any work.

Pure: knows neither the wire nor replicas. The checks of ids, lengths and sampling are those
of the scheduler; made here, they cost a replica nothing.
"""

from dataclasses import dataclass

from radixmesh.blocks import ID_BYTES, Namespace
from radixmesh.errors import (
    InvalidRequest,
    PromptTooLong,
    TokenizerMismatch,
    UnsupportedParameter,
)
from worker.request import Add, Sampling
from worker.schedule.check import check as check_add
from worker.schedule.limits import Limits

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

    @property
    def limits(self) -> Limits:
        """What the scheduler of a replica takes."""
        return Limits(
            max_model_len=self.max_model_len,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_batched_tokens=self.max_batched_tokens,
            vocab_size=self.vocab_size,
            eos_ids=frozenset(self.eos_ids),
        )


def to_add(ask: Ask, info: GroupInfo, *, request_id: int) -> Add:
    """Return what is sent to the ranks, unless it is refused.

    Raises:
        TokenizerMismatch: The ids come from another tokenizer.
        UnsupportedParameter: An adapter is named; none is loaded.
        PromptTooLong: Prompt and output exceed the context length or the KV cache.
        InvalidRequest: Ids, lengths or sampling are out of range, or the salt is too long;
            see `worker.schedule.check`.
    """
    if ask.fingerprint and ask.fingerprint != info.fingerprint:
        raise TokenizerMismatch(
            "the ids were made by another tokenizer than this group's",
            given=ask.fingerprint,
            expected=info.fingerprint,
        )
    if ask.adapter:
        raise UnsupportedParameter("this group has no adapters", field="adapter")
    if ask.token_count > info.max_model_len:  # before anybody looks at every id
        raise PromptTooLong(
            f"prompt and output have {ask.token_count} ids, a replica takes {info.max_model_len}",
            field="prompt_ids",
            limit=info.max_model_len,
        )
    if len(ask.cache_salt.encode()) > MAX_SALT_BYTES:
        raise InvalidRequest("the cache salt is too long", field="cache_salt", limit=MAX_SALT_BYTES)
    namespace = Namespace(
        model=info.model,
        weight_version=info.weight_version,
        fingerprint=info.fingerprint,
        adapter=ask.adapter,
        cache_salt=ask.cache_salt,
    )
    add = Add(
        request_id=request_id,
        prompt=ask.prompt,
        output=ask.output,
        sampling=ask.sampling,
        namespace=namespace.encode(),
        priority=ask.priority,
        timeout_ms=ask.timeout_ms,
    )
    check_add(add, info.limits)
    return add
