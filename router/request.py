"""What the router is asked for and what it answers, without any wire format.

The edges translate protobuf and JSON into these and back; the pipeline knows
only these.
"""

import enum
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, encoded as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the model's chat template."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Token ids, little-endian uint32, used as they are."""

    ids: bytes


Prompt = TextPrompt | ChatPrompt | IdsPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How ids are drawn. None: the server decides (`max_tokens`) or draws (`seed`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request of a client: one prompt, one or more outputs.

    Attributes:
        request_id: A label from outside or made by the edge; never used as a key.
        session: What the client calls its conversation; empty when it gave nothing.
        timeout_s: Seconds until the deadline, or None for the server's default.
    """

    prompt: Prompt
    request_id: str = ""
    model: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    choices: int = 1
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    session: str = ""
    hint_group: str = ""
    hint_dp_rank: int | None = None
    keep_special_tokens: bool = False
    timeout_s: float | None = None


class FinishReason(enum.IntEnum):
    """Why an output ended; the values of radixmesh.common.v1.FinishReason."""

    STOP_TOKEN = 1
    STOP_STRING = 2
    LENGTH = 3


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability (natural) of one sampled id; `raw` is the id rendered by itself."""

    token_id: int
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one output and the ids that it covers (little-endian uint32)."""

    choice: int
    text: str
    ids: bytes
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Counts of ids."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """Where an output ran, what was predicted, what came true.

    About the first attempt, but for `last_group_id` and `last_dp_rank`: where it finished.

    Attributes:
        possible_blocks: The most of the prompt that any replica held or was about to hold.
        predicted_blocks: What this one did; `held_blocks` of them were in its cache.
        view: How far its cache was known; a value of router.v1.ViewState, 0: not known.
        price_s: `predicted_wait_s + alpha * prefill_s + crowding_s + eviction_s`.
    """

    group_id: str = ""
    dp_rank: int = 0
    block_tokens: int = 0
    prompt_blocks: int = 0
    predicted_blocks: int = 0
    actual_blocks: int = 0
    predicted_wait_s: float = 0.0
    actual_wait_s: float = 0.0
    policy: str = ""
    attempts: int = 1
    seed: int
    last_group_id: str = ""
    last_dp_rank: int = 0
    possible_blocks: int = 0
    held_blocks: int = 0
    view: int = 0
    price_s: float = 0.0
    prefill_s: float = 0.0
    alpha: float = 0.0
    crowding_s: float = 0.0
    eviction_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The end of one output; its last event."""

    choice: int
    reason: FinishReason
    stop_matched: str
    usage: Usage
    receipt: Receipt


Event = Delta | Finish
