"""How a user of the library says what is drawn, and what the ranks are told of it. Pure."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from radixmesh.errors import BadSampling
from worker.request import Sampling

# Of outputs for which nobody says how long they may be.
DEFAULT_MAX_TOKENS: Final = 256
MAX_CHOICES: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the outputs of a prompt are drawn.

    Attributes:
        temperature: 0 takes the likeliest id.
        top_p: Only the likeliest ids that together have this probability.
        top_k: Only so many of the likeliest ids; 0 means all.
        min_p: Only ids at least so probable, as a share of the likeliest one's.
        max_tokens: Ids of an output; None means 256, or what the context leaves if less.
        min_tokens: An output does not end by itself before it has so many.
        seed: Same seed, prompt and place among the choices: same output. None draws one.
        n: Outputs of the prompt, each drawn by itself.
        stop_ids: Ids that end an output, besides the model's own.
        ignore_eos: Go on after an id that ends an output.
        logprobs: Report the log probability of each id.
        top_logprobs: Report so many of the likeliest ids at each position too.
        prompt_logprobs: Report the log probability of each prompt id.
        presence_penalty: Taken off the logit of each id that the output has.
        frequency_penalty: Taken off as often as the output has it.
        repetition_penalty: Divides the logits of ids that prompt or output have.
        logit_bias: Added to the logits of ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    seed: int | None = None
    n: int = 1
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)


def to_samplings(params: SamplingParams, *, room: int) -> list[Sampling]:
    """Return what the ranks are told, one for each choice. Ranges are checked by the group.

    Args:
        params: What the user said.
        room: Ids that the context leaves for output.

    Raises:
        BadSampling: `n` is out of range, or a value is not of its type.
    """
    try:
        sampling = Sampling(
            seed=secrets.randbits(63) if params.seed is None else int(params.seed),
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=int(params.top_k),
            min_p=float(params.min_p),
            max_tokens=_max_tokens(params, room),
            min_tokens=int(params.min_tokens),
            stop_ids=tuple(int(each) for each in params.stop_ids),
            ignore_eos=bool(params.ignore_eos),
            logprobs=bool(params.logprobs),
            top_logprobs=int(params.top_logprobs),
            prompt_logprobs=bool(params.prompt_logprobs),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logit_bias=tuple((int(at), float(bias)) for at, bias in params.logit_bias.items()),
        )
        count = int(params.n)
    except (TypeError, ValueError, OverflowError, AttributeError) as fault:
        raise BadSampling(f"a sampling parameter is not of its type: {fault}") from fault
    if not 1 <= count <= MAX_CHOICES:
        raise BadSampling(f"n is out of range: 1 to {MAX_CHOICES}", field="n")
    return [_choice(sampling, choice) for choice in range(count)]


def _max_tokens(params: SamplingParams, room: int) -> int:
    if params.max_tokens is not None:
        return int(params.max_tokens)
    return max(1, int(params.min_tokens), min(DEFAULT_MAX_TOKENS, room))


def _choice(sampling: Sampling, choice: int) -> Sampling:
    # Prompts are scored once, not once for each choice.
    return structs.replace(
        sampling, choice=choice, prompt_logprobs=sampling.prompt_logprobs and choice == 0
    )
