"""The interface between a step's plan and whatever computes it."""

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from worker.request import Sampling, Tops

_NO_TOPS: Final = Tops()


# One for every running request in every step: freezing would cost twice.
@dataclass(slots=True)
class Row:
    """The part of one request that a step computes.

    Attributes:
        request_id: Which request.
        ids: The ids to compute in this step, at positions `start`, `start + 1`, ...
        start: Position of the first of them; the KV of 0..start-1 is in `blocks`.
        blocks: Block table: block i holds positions i*block_tokens and following. Covers
            all positions up to the last of `ids`.
        sampled: Whether the last id of `ids` is the last known one, so the next is drawn.
        output_position: Output position of the id that is drawn; keys the draw.
        sampling: How to draw it.
        banned: Ids that must not be drawn (end ids before min_tokens).
        future: The one id of `ids` is what the step before draws for its `future`-th row
            that draws; `ids` holds a 0 in its place. -1: all ids are known.
        history: Prompt and output ids that penalties count, the future one not among
            them; None where no penalty asks. `prompt_tokens` of them are the prompt.
        targets: For prompt logprobs: the prompt ids at `start + 1`, `start + 2`, ..., whose
            logprobs are wanted; at most one per id of `ids`. None where not asked.
    """

    request_id: int
    ids: "array[int]"
    start: int
    blocks: list[int]
    sampled: bool
    output_position: int
    sampling: Sampling
    banned: tuple[int, ...] = ()
    future: int = -1
    history: "array[int] | None" = None
    prompt_tokens: int = 0
    targets: "array[int] | None" = None

    @property
    def prefills(self) -> bool:
        """Whether it computes a prompt, not the one id that was drawn last."""
        return len(self.ids) > 1 or not self.sampled or self.output_position == 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. The same on every rank of a replica; `digest` proves it."""

    step: int
    rows: tuple[Row, ...]
    digest: int = 0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step drew.

    Attributes:
        ids: One per sampled row, in the plan's order.
        logprobs: Of those; NaN where not asked.
        tops: Their likeliest alternatives; no counts at all when nobody asked.
        prompt: For each row with `targets`, in the plan's order: their logprobs and
            alternatives.
    """

    ids: list[int]
    logprobs: list[float]
    tops: Tops = _NO_TOPS
    prompt: list[tuple[list[float], Tops]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine can take.

    `kv_blocks` is what this rank could hold until `reserve` makes it what it does hold;
    `eos_ids` end an output unless it ignores them.
    """

    block_tokens: int
    kv_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]


class Engine(Protocol):
    """Computes steps on one rank's shard, in the order in which they are launched.

    A row whose computation fails alone raises nothing: the engine knows no requests. An
    exception means that the replica is broken.
    """

    @property
    def info(self) -> EngineInfo:
        """What it can take; see EngineInfo for how `reserve` changes it."""
        ...

    def reserve(self, kv_blocks: int) -> None:
        """Make the KV cache, and run once. Called once, before the first launch, by all ranks.

        `kv_blocks` is at most what every rank's info says.
        """
        ...

    def launch(self, plan: StepPlan) -> None:
        """Begin a step that has rows: compute them, write their KV into their blocks, draw."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was launched and not collected yet.

        Every rank of a replica returns the same.
        """
        ...

    def read_weights(self, folder: Path) -> None:
        """Read other weights and hold them beside those in use; may take minutes.

        No step is under way. `use_weights` or `drop_weights` follows, as all ranks agreed;
        where this raises, `drop_weights` does.

        Raises:
            InvalidRequest, NotSupported: They can't be read, or don't fit this model.
        """
        ...

    def use_weights(self) -> None:
        """Compute with what `read_weights` read from now on."""
        ...

    def drop_weights(self) -> None:
        """Forget what `read_weights` read: another rank could not."""
        ...

    def close(self) -> None:
        """Free what the engine holds. Called once."""
        ...


def run_step(engine: Engine, plan: StepPlan) -> StepResult:
    """Launch a step and wait for it."""
    engine.launch(plan)
    return engine.collect()
