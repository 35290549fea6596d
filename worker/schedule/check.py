"""What a replica refuses about a single request, before it costs anything. Pure."""

from radixmesh.blocks import ID_BYTES, unpack_ids
from radixmesh.errors import BadSampling, InvalidRequest, MeshError, PromptTooLong, UnknownToken
from worker.request import Add, Sampling
from worker.schedule.limits import Limits

_MAX_SEED = (1 << 64) - 1
_MAX_TEMPERATURE = 100.0
_MAX_PENALTY = 2.0
_MAX_REPETITION = 100.0
_MAX_BIAS = 100.0
MAX_BIASES = 1024
MAX_STOP_IDS = 64
_MAX_TOP_LOGPROBS = 20
_MAX_PRIORITY = (1 << 31) - 1


def check(add: Add, limits: Limits) -> None:
    """Refuse what cannot be generated.

    Raises:
        InvalidRequest: The prompt is empty or no run of ids, or the priority is out of range.
        UnknownToken: An id is outside the vocabulary.
        PromptTooLong: The prompt leaves no room for output, in context or KV cache.
        BadSampling: A sampling parameter is out of range.
    """
    _check_ids(add, limits)
    if not -_MAX_PRIORITY - 1 <= add.priority <= _MAX_PRIORITY:
        raise InvalidRequest("priority is no number of 32 bits", field="priority")
    fault = _sampling_fault(add.sampling, limits)
    if fault is not None:
        raise fault


def _check_ids(add: Add, limits: Limits) -> None:
    if len(add.prompt) % ID_BYTES or len(add.output) % ID_BYTES:
        raise InvalidRequest("ids are not a run of 32-bit numbers", field="prompt_ids")
    length = len(add.prompt) // ID_BYTES
    if length == 0:
        raise InvalidRequest("the prompt is empty", field="prompt_ids")
    if length >= limits.max_model_len:
        raise PromptTooLong(
            f"the prompt has {length} ids; prompt and output together have at most "
            f"{limits.max_model_len}",
            field="prompt_ids",
            limit=limits.max_model_len,
        )
    for name, raw in (("prompt_ids", add.prompt), ("output_ids", add.output)):
        highest = max(unpack_ids(raw), default=0)
        if highest >= limits.vocab_size:
            raise UnknownToken(f"id {highest} is outside the vocabulary", field=name)


def _sampling_fault(sampling: Sampling, limits: Limits) -> MeshError | None:
    ends = limits.eos_ids.union(sampling.stop_ids)
    # A NaN fails every comparison, so it is out of range too.
    ranges = (
        ("seed", 0 <= sampling.seed <= _MAX_SEED),
        ("temperature", 0.0 <= sampling.temperature <= _MAX_TEMPERATURE),
        ("top_p", 0.0 < sampling.top_p <= 1.0),
        ("top_k", sampling.top_k >= 0),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("max_tokens", sampling.max_tokens >= 1),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens),
        ("stop_token_ids", len(sampling.stop_ids) <= MAX_STOP_IDS),
        # Something must be left to draw while ends are banned.
        ("stop_token_ids", len(ends) <= max(2, limits.vocab_size // 2)),
        ("top_logprobs", 0 <= sampling.top_logprobs <= _MAX_TOP_LOGPROBS),
        ("presence_penalty", abs(sampling.presence_penalty) <= _MAX_PENALTY),
        ("frequency_penalty", abs(sampling.frequency_penalty) <= _MAX_PENALTY),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty <= _MAX_REPETITION),
        ("logit_bias", len(sampling.logit_bias) <= MAX_BIASES),
        ("logit_bias", all(abs(value) <= _MAX_BIAS for _, value in sampling.logit_bias)),
    )
    for field, holds in ranges:
        if not holds:
            return BadSampling(f"{field} is out of range", field=field)
    biased = tuple(token_id for token_id, _ in sampling.logit_bias)
    for field, ids in (("stop_token_ids", sampling.stop_ids), ("logit_bias", biased)):
        outside = [one for one in ids if not 0 <= one < limits.vocab_size]
        if outside:
            return UnknownToken(f"id {outside[0]} is outside the vocabulary", field=field)
    return None
