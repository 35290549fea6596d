"""Drives an engine without a scheduler: plans made by hand, block tables chosen by the test."""

from array import array
from dataclasses import dataclass, field
from typing import TypeVar

from worker.engine.engine import Engine, Row, StepPlan, run_step
from worker.request import Sampling

AnyEngine = TypeVar("AnyEngine", bound=Engine)

GREEDY = Sampling(seed=0, temperature=0.0)


@dataclass(slots=True)
class Stream:
    """One sequence: its known ids (copied), its block table, how many positions are computed."""

    ids: list[int]
    table: list[int]
    sampling: Sampling = GREEDY
    computed: int = 0
    prompt: int = 0
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = list(self.ids)
        self.prompt = self.prompt or len(self.ids)

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt :]

    def row(self, number: int, chunk: int) -> Row:
        end = min(len(self.ids), self.computed + chunk)
        return Row(
            request_id=number,
            ids=array("I", self.ids[self.computed : end]),
            start=self.computed,
            blocks=self.table,
            sampled=end == len(self.ids),
            output_position=len(self.output),
            sampling=self.sampling,
        )


def step(engine: Engine, streams: list[Stream], *, chunk: int = 1 << 30) -> None:
    """Run one step of all streams, at most `chunk` ids of each."""
    rows = tuple(stream.row(number, chunk) for number, stream in enumerate(streams))
    result = run_step(engine, StepPlan(0, rows))
    drawn = iter(zip(result.ids, result.logprobs, strict=True))
    for stream, row in zip(streams, rows, strict=True):
        stream.computed += len(row.ids)
        if row.sampled:
            token_id, logprob = next(drawn)
            stream.ids.append(token_id)
            stream.logprobs.append(logprob)


def run(engine: Engine, streams: list[Stream], count: int, *, chunk: int = 1 << 30) -> None:
    """Step until every stream has `count` output ids; finished ones leave the batch."""
    while going := [stream for stream in streams if len(stream.output) < count]:
        step(engine, going, chunk=chunk)


def reserved(engine: AnyEngine) -> AnyEngine:
    """Return the engine with all the KV cache that it can hold."""
    engine.reserve(engine.info.kv_blocks)
    return engine
