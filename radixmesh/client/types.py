"""What a client says to the mesh and hears from it. Plain values; no protobuf, no gRPC."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

__all__ = [
    "CandidatePrice",
    "Chunk",
    "Explanation",
    "Finish",
    "FinishReason",
    "Message",
    "Model",
    "Options",
    "Output",
    "Phase",
    "Prompt",
    "Receipt",
    "Replica",
    "Result",
    "Sampling",
    "TokenLogprob",
    "Usage",
    "View",
]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


# Text as it stands; a conversation for the chat template; or token ids.
Prompt = str | Sequence[Message] | Sequence[Mapping[str, str]] | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How ids are drawn. None leaves it to the server."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit)


class Options(TypedDict, total=False):
    """Everything but the prompt that a request may say, by keyword.

    `timeout_s` bounds the whole stream. `request_id` labels it in the server's logs.
    `group_id` and `dp_rank` are wishes about the place. The rest is in the contract,
    `protos/radixmesh/router/v1/router_service.proto`.
    """

    model: str
    sampling: Sampling
    stop: Sequence[str]
    include_stop: bool
    choices: int
    priority: int
    tenant: str
    cache_salt: str
    session: str
    group_id: str
    dp_rank: int
    add_generation_prompt: bool
    keep_special_tokens: bool
    timeout_s: float
    request_id: str


class FinishReason(enum.Enum):
    """Why an output ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of one sampled id; `raw` is the id rendered by itself."""

    token_id: int
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of ids; `cached_tokens` of the prompt were not computed again."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class View(enum.Enum):
    """How far a router trusts its picture of a replica's cache."""

    UNKNOWN = "unknown"
    EXACT = "exact"
    DEGRADED = "degraded"
    BLIND = "blind"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Where an output ran, what the router predicted (blocks, seconds), what came true.

    About the first attempt, but for `last_group_id` and `last_dp_rank`: where it finished
    (empty from a router that does not say). `possible_blocks` is the most that any replica
    held or was about to hold; `held_blocks` of the predicted ones were in the cache already.
    `price_s` is `predicted_wait_s + alpha * prefill_s + crowding_s + eviction_s`.
    """

    group_id: str
    dp_rank: int
    block_tokens: int
    prompt_blocks: int
    predicted_blocks: int
    actual_blocks: int
    predicted_wait_s: float
    actual_wait_s: float
    policy: str
    attempts: int
    seed: int
    last_group_id: str = ""
    last_dp_rank: int = 0
    possible_blocks: int = 0
    held_blocks: int = 0
    view: View = View.UNKNOWN
    price_s: float = 0.0
    prefill_s: float = 0.0
    alpha: float = 0.0
    crowding_s: float = 0.0
    eviction_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of one output. `stop_matched` is the stop string that ended it, or empty."""

    reason: FinishReason
    stop_matched: str
    usage: Usage
    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """New text of one output; its last chunk alone has `finish`, and no text."""

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One whole output."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_matched: str
    usage: Usage
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Result:
    """All outputs of a request; the properties are those of the first."""

    outputs: tuple[Output, ...]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason

    @property
    def usage(self) -> Usage:
        """Counts of the first output."""
        return self.outputs[0].usage

    @property
    def receipt(self) -> Receipt:
        """Where the first output ran."""
        return self.outputs[0].receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A served model; `fingerprint` is the SHA-256 of its tokenizer.json."""

    name: str
    max_model_len: int
    fingerprint: str
    ready_replica_count: int


class Phase(enum.Enum):
    """Whether a replica gets requests."""

    UNKNOWN = "unknown"
    CONNECTING = "connecting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica as a router sees it; counts of `fleet_service.proto`.

    `reason` says why it gets no new requests; it is empty when it does.
    """

    group_id: str
    address: str
    dp_rank: int
    model: str
    incarnation: int
    phase: Phase
    view: View
    running_count: int
    waiting_count: int
    in_flight_count: int
    cached_block_count: int
    kv_block_count: int
    free_block_count: int
    block_tokens: int
    routed_count: int
    prompt_token_count: int
    cached_token_count: int
    prefill_rate: float
    topology: str
    reason: str = ""

    @property
    def hit_rate(self) -> float | None:
        """Share of what requests brought that was reused, 0 to 1; None before the first."""
        if not self.prompt_token_count:
            return None
        return self.cached_token_count / self.prompt_token_count


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePrice:
    """The price of one replica for a prompt, in seconds.

    `reason` says why it can't be chosen, or what speaks against it; `held_blocks` of the
    matched ones are in its cache, the others are about to be.
    """

    group_id: str
    dp_rank: int
    eligible: bool
    reason: str
    prompt_blocks: int
    matched_blocks: int
    wait_s: float
    prefill_s: float
    alpha: float
    crowding_s: float
    eviction_s: float
    total_s: float
    view: View
    chosen: bool = False
    phase: Phase = Phase.UNKNOWN
    held_blocks: int = 0
    running_count: int = 0
    waiting_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What a router would do with a prompt: the chosen replica first, then by price."""

    prompt_token_count: int
    policy: str
    candidates: tuple[CandidatePrice, ...]
