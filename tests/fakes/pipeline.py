"""A pipeline for tests of the edges: says what a script says, and tells whether it was closed."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

from router.request import (
    Delta,
    Event,
    Finish,
    FinishReason,
    GenerateRequest,
    Receipt,
    TextPrompt,
    Usage,
)

RECEIPT = Receipt(
    group_id="g0",
    dp_rank=1,
    block_tokens=16,
    prompt_blocks=3,
    predicted_blocks=2,
    actual_blocks=2,
    predicted_wait_s=0.25,
    actual_wait_s=0.5,
    policy="price",
    attempts=1,
    seed=7,
    last_group_id="g1",
    last_dp_rank=2,
)


@dataclass(frozen=True, slots=True)
class Served:
    name: str
    max_model_len: int = 4096
    fingerprint: str = "f"
    ready_replicas: int = 1


def finish(
    choice: int = 0,
    reason: FinishReason = FinishReason.STOP_TOKEN,
    *,
    cached: int = 32,
    completion: int = 3,
) -> Finish:
    usage = Usage(prompt_tokens=40, cached_tokens=cached, completion_tokens=completion)
    return Finish(choice=choice, reason=reason, stop_matched="", usage=usage, receipt=RECEIPT)


def words(text: str, choice: int = 0) -> list[Event]:
    """A stream that says the words of `text`, one delta each."""
    deltas = [Delta(choice, word, b"\x01\x00\x00\x00") for word in text.split("|")]
    return [*deltas, finish(choice, completion=len(deltas))]


HANG = "hang"
Step = Event | Exception | str


@dataclass
class ScriptedPipeline:
    """Yields `script`, in which an error is raised and `HANG` waits for ever.

    `other_scripts` answer the text prompts that they are keyed by.
    """

    script: Sequence[Step] = ()
    other_scripts: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    served: Sequence[Served] = (Served("tiny"),)
    requests: list[GenerateRequest] = field(default_factory=list)
    open_count: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    def models(self) -> Sequence[Served]:
        return self.served

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        self.requests.append(request)
        self.open_count += 1
        try:
            prompt = request.prompt.text if isinstance(request.prompt, TextPrompt) else ""
            for step in self.other_scripts.get(prompt, self.script):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, str):
                    self.hanging.set()
                    await asyncio.Event().wait()
                else:
                    await asyncio.sleep(0)
                    yield step
        finally:
            self.open_count -= 1
            self.closed.set()
