"""What the front sends to a replica and gets back: requests, cancels, step outputs.

The messages of the unix socket between the front and rank (0, 0), and the part
of them that rank (0, 0) broadcasts. Columns where a step has many entries. Knows
no protobuf (the front's `wire.py` translates) and no tensors.
"""

from typing import Final

import msgspec

# Why an output ended; the values of radixmesh.common.v1.FinishReason.
GOES_ON: Final = 0
STOP_TOKEN: Final = 1
LENGTH: Final = 3


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How the ids of one output are drawn. Everything is decided; nothing is optional.

    `seed` and `choice`, with the output position, key the draw.
    """

    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, added to its logit)

    @property
    def biases(self) -> dict[int, float]:
        """What is added to the logit of each id; biases of one id add up."""
        total: dict[int, float] = {}
        for token_id, bias in self.logit_bias:
            total[token_id] = total.get(token_id, 0.0) + bias
        return total

    @property
    def penalized(self) -> bool:
        """Whether a draw depends on the ids before it otherwise than through the model."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


class Add(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A request for one output.

    Attributes:
        request_id: The front's number for it, never reused in an incarnation.
        prompt: Prompt ids, little-endian uint32.
        output: Ids that earlier attempts generated, little-endian uint32.
        namespace: `blocks.Namespace.encode()`; prefixes are shared only inside one.
        priority: Higher goes first.
        timeout_ms: Time left until its deadline; 0 means none.
    """

    request_id: int
    prompt: bytes
    output: bytes
    sampling: Sampling
    namespace: bytes
    priority: int = 0
    timeout_ms: int = 0


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Give up these requests. Unknown numbers are ignored."""

    request_ids: list[int]


class Flush(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Empty the prefix cache; answered with the number of blocks that left it."""

    token: int


class Probe(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Answer when every rank has planned the step that brought this."""

    token: int


class Pause(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Compute nothing until a later one says otherwise; requests keep their places.

    Answered with 0 when no step is under way.
    """

    token: int
    paused: bool


class Weights(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Compute with the weights of another directory from now on.

    The cache is emptied and running requests are computed anew. Answered with 0, or with
    an error when the weights do not fit; then nothing has changed.
    """

    token: int
    folder: str
    version: str


Control = Flush | Probe | Pause | Weights
Inbound = Add | Cancel | Control


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The prefill of a request began."""

    request_id: int
    cached_tokens: int
    waited_us: int


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """A request ended by an error; `reason` is an ErrorReason name."""

    request_id: int
    reason: str
    message: str


class CacheChange(msgspec.Struct, frozen=True, array_like=True):
    """One change of the prefix cache, in order. Exactly one of three kinds.

    Stored: `stored` holds consecutive blocks of one prompt below `parent` (0: the
    first block). Removed: `removed` holds keys, children before parents. Cleared:
    both are empty and `cleared` is true.
    """

    parent: int = 0
    stored: list[int] = []  # msgspec copies empty defaults
    removed: list[int] = []
    cleared: bool = False


class CacheDigest(msgspec.Struct, frozen=True, array_like=True):
    """Proof of the cache after all changes so far: how many blocks, and their keys' xor."""

    block_count: int
    xor_keys: int


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """Absolute load of a replica. Rates are 0 until learned."""

    running: int
    waiting: int
    uncached_tokens: int
    free_blocks: int
    prefill_rate: float
    decode_step_s: float
    last_request_id: int


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What became of a Control: a number, or an error by its ErrorReason name."""

    token: int
    number: int = 0
    reason: str = ""
    message: str = ""


class Tops(msgspec.Struct, frozen=True, array_like=True):
    """Likeliest alternatives of consecutive ids: the i-th has `counts[i]` of both columns."""

    counts: list[int] = []
    ids: list[int] = []
    logprobs: list[float] = []


NO_TOPS: Final = Tops()  # where nobody asked


class PromptScores(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of prompt ids, from prompt position `position` on; never of position 0."""

    request_id: int
    position: int
    logprobs: list[float]
    tops: Tops


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """All that one step of a replica has to say, from rank (0, 0) to the front.

    Columns: entry i of `request_ids` has `counts[i]` ids of `token_ids`, of which
    the first stands at output position `positions[i]`; `finishes[i]` is 0 while it
    goes on. `logprobs` is empty, or has one value per id, NaN where not asked;
    `tops` likewise, with 0 alternatives where not asked.
    """

    step: int
    accepted: list[int]
    started: list[Started]
    request_ids: list[int]
    positions: list[int]
    counts: list[int]
    finishes: list[int]
    token_ids: bytes
    logprobs: list[float]
    failed: list[Failed]
    changes: list[CacheChange]
    digest: CacheDigest
    load: LoadReport
    answers: list[Answer] = []
    tops: Tops = NO_TOPS
    prompt_scores: list[PromptScores] = []


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """First message of a rank: what it can take."""

    block_tokens: int
    kv_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    startup_s: float


class Broken(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Last message of a rank that cannot go on: an ErrorReason name and a text.

    `ended`: the end of a process, this one or another, seems to explain it; none is stuck.
    """

    reason: str
    message: str
    ended: bool = False


Outbound = StepOutput | Ready | Broken
