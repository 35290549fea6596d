"""The interface between a step's plan and whatever computes it."""

from array import array
from dataclasses import dataclass
from typing import Protocol

from worker.request import Sampling


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
    """

    request_id: int
    ids: "array[int]"
    start: int
    blocks: list[int]
    sampled: bool
    output_position: int
    sampling: Sampling
    banned: tuple[int, ...] = ()

    @property
    def prefills(self) -> bool:
        """Whether it computes a prompt, not the one id that was drawn last."""
        return len(self.ids) > 1 or not self.sampled or self.output_position == 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. The same on every rank of a replica."""

    step: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Drawn ids, one per sampled row in the plan's order; logprobs are NaN where not asked."""

    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine can take. `eos_ids` end an output unless it ignores them."""

    block_tokens: int
    kv_blocks: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]


class Engine(Protocol):
    """Computes steps on one rank's shard."""

    @property
    def info(self) -> EngineInfo:
        """Fixed after construction."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute the rows, write their KV into their blocks, draw the next ids.

        Every rank of a replica returns the same result. A row whose computation fails
        alone raises nothing here: the engine must not know of requests. An exception
        means that the replica is broken.
        """
        ...

    def close(self) -> None:
        """Free what the engine holds. Called once."""
        ...
