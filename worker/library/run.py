"""One output on its way: what was asked, what has come so far, and what it is in the end.

Keeps the journal from which a run goes on in another life of the ranks. Knows
columns; knows neither replicas nor threads.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from radixmesh.blocks import ID_BYTES, pack_ids, unpack_ids
from radixmesh.errors import MeshError
from worker.front.ask import Ask
from worker.front.jobs import Job
from worker.request import GOES_ON, LENGTH, STOP_TOKEN, Sampling, Tops

FinishReason = Literal["stop_token", "length"]
# Likeliest ids of one position, the likeliest first: (id, log probability).
Top = list[tuple[int, float]]

# A run that was lost so often without a new id goes on alone, so that it takes nobody along.
SUSPECT_LOSSES: Final = 2
_REASONS: Final[dict[int, FinishReason]] = {STOP_TOKEN: "stop_token", LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came of one choice of one prompt.

    Attributes:
        prompt: Which of the given prompts, from 0; choice: which of its outputs.
        prompt_ids: The prompt as ids; empty where it could not be read.
        ids: The output, its end id included.
        text: The output as text, without special tokens; None when not asked for.
        finish_reason: `stop_token` (an id ended it) or `length`; None after an error.
        logprobs: Of each of `ids`, natural; empty when not asked for.
        tops: Likeliest ids at each of the output's positions; empty when not asked for.
        prompt_logprobs: Of each prompt id, NaN for the first; empty when not asked for.
        prompt_tops: Likeliest ids at each position of the prompt, likewise.
        cached_tokens: Prompt ids that were found in the cache when it began.
        weight_version: Of the weights that chose the last id.
        error: Why it failed, or None.
    """

    prompt: int
    choice: int
    prompt_ids: list[int]
    ids: list[int]
    text: str | None
    finish_reason: FinishReason | None
    logprobs: list[float]
    tops: list[Top]
    prompt_logprobs: list[float]
    prompt_tops: list[Top]
    cached_tokens: int
    weight_version: str
    error: MeshError | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New ids of a stream. `text` holds back what may still change; the last has the rest.

    `finish_reason` is set in the last one alone.
    """

    ids: list[int]
    text: str
    logprobs: list[float]
    tops: list[Top]
    finish_reason: FinishReason | None
    weight_version: str


@dataclass(slots=True, kw_only=True)
class Delta:
    """What one step said of one run. `logprobs` and `tops` mean nothing where not asked for."""

    position: int
    ids: bytes
    logprobs: Sequence[float] = ()
    tops: Sequence[Top] = ()
    finish: int = GOES_ON
    weight_version: str = ""


@dataclass(eq=False, slots=True, kw_only=True)
class Run:
    """One output. Belongs to the event loop of the group from its begin to its end.

    Attributes:
        slot: Its place among the runs that were begun together.
        prompt: Prompt ids, little-endian uint32.
        first: The first choice of the same prompt, or itself; choices share its replica.
        on_end: Told once, when `finish` or `error` is set.
        on_delta: Told of every step.
        losses: How often in a row it was lost without a new id.
    """

    slot: int
    prompt_index: int
    prompt: bytes
    sampling: Sampling
    is_text: bool
    cache_salt: str
    priority: int
    on_end: Callable[["Run"], None]
    on_delta: Callable[[Delta], None] | None = None
    first: "Run | None" = None
    job: Job | None = None
    ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[float] = field(default_factory=list)
    tops: list[Top] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_tops: list[Top] = field(default_factory=list)
    cached_tokens: int | None = None
    weight_version: str = ""
    finish: int = GOES_ON
    error: MeshError | None = None
    losses: int = 0
    _progress: int = 0

    @property
    def over(self) -> bool:
        """Whether it has ended, well or not."""
        return self.finish != GOES_ON or self.error is not None

    @property
    def suspect(self) -> bool:
        """Whether it may be what takes its replicas down."""
        return self.losses >= SUSPECT_LOSSES

    def ask(self, dp_rank: int | None = None) -> Ask:
        """Return what the group is asked; what has come already is not asked again."""
        return Ask(
            prompt=self.prompt,
            output=pack_ids(self.ids),
            sampling=self.sampling,
            cache_salt=self.cache_salt,
            priority=self.priority,
            dp_rank=dp_rank,
        )

    def take(self, delta: Delta) -> None:
        """Take what a step said.

        Raises:
            ValueError: An id is missing or doubled.
        """
        if delta.position != len(self.ids):
            raise ValueError(f"ids at {delta.position} came when {len(self.ids)} was next")
        self.ids.extend(unpack_ids(delta.ids))
        if self.sampling.logprobs:
            self.logprobs.extend(delta.logprobs)
        if self.sampling.top_logprobs:
            self.tops.extend(delta.tops)
        self.finish = delta.finish
        self.weight_version = delta.weight_version
        if self.on_delta is not None:
            self.on_delta(delta)

    def take_scores(self, position: int, logprobs: Sequence[float], tops: Sequence[Top]) -> None:
        """Take logprobs of the prompt from a position on; after a loss they come once more."""
        length = len(self.prompt) // ID_BYTES
        if not self.prompt_logprobs:
            self.prompt_logprobs = [math.nan] * length
        self.prompt_logprobs[position : position + len(logprobs)] = logprobs
        if tops:
            if not self.prompt_tops:
                self.prompt_tops = [[] for _ in range(length)]
            self.prompt_tops[position : position + len(tops)] = tops

    def lose(self) -> None:
        """Count the loss of its replica."""
        progressed = len(self.ids) > self._progress
        self.losses = 1 if progressed else self.losses + 1
        self._progress = len(self.ids)
        self.job = None

    def output(self, text: str | None) -> Output:
        """Return what came of it."""
        return Output(
            prompt=self.prompt_index,
            choice=self.sampling.choice,
            prompt_ids=unpack_ids(self.prompt).tolist(),
            ids=self.ids.tolist(),
            text=text,
            finish_reason=finish_reason(self.finish),
            logprobs=self.logprobs,
            tops=self.tops,
            prompt_logprobs=self.prompt_logprobs,
            prompt_tops=self.prompt_tops,
            cached_tokens=self.cached_tokens or 0,
            weight_version=self.weight_version,
            error=self.error,
        )


def finish_reason(finish: int) -> FinishReason | None:
    """Name a reason of `worker.request`; None while an output goes on."""
    return _REASONS.get(finish)


def tops_of(tops: Tops) -> list[Top]:
    """Return columns of alternatives as one list for each id."""
    rows: list[Top] = []
    at = 0
    for count in tops.counts:
        end = at + count
        rows.append(list(zip(tops.ids[at:end], tops.logprobs[at:end], strict=True)))
        at = end
    return rows
