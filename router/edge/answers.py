"""OpenAI's answers, made from what the pipeline says. Knows events and what follows what; no HTTP.

An `Answer` follows one request through its events and gives its chunks, or its whole
body at the end; `styles.py` knows how a choice looks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from radixmesh.errors import InternalError
from router.edge.styles import Json, Output, Style, finish_reason
from router.request import Event, Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of an answer share. `choices` is how many outputs there will be."""

    id: str
    created: int
    model: str
    choices: int
    include_usage: bool = False
    receipts: bool = False
    logprobs: bool = False


class Answer:
    """Follows one request: `take` every event, then `body`; or `chunks` for every event.

    Outputs are numbered through all prompts of the request; `choices_per_prompt` says
    which belong to one, because a prompt is counted once whatever its outputs.
    """

    def __init__(self, style: Style, head: Head, *, choices_per_prompt: int) -> None:
        self._style = style
        self._head = head
        self._per_prompt = choices_per_prompt
        self._outputs = [Output() for _ in range(head.choices)]
        self._opened: set[int] = set()
        self._offsets = [0] * head.choices

    def take(self, event: Event) -> None:
        """Keep an event for `body`."""
        output = self._outputs[event.choice]
        if isinstance(event, Finish):
            output.finish = event
        else:
            output.texts.append(event.text)
            output.logprobs.extend(event.logprobs)

    def body(self) -> Json:
        """Return the whole answer.

        Raises:
            InternalError: An output did not end.
        """
        finishes = self._finishes()
        choices = [
            self._style.all(index, output, logprobs=self._head.logprobs)
            for index, output in enumerate(self._outputs)
        ]
        whole = self._frame(self._style.whole, choices)
        whole["usage"] = self._usage(finishes)
        return self._with_receipts(whole, finishes)

    def chunks(self, event: Event) -> list[Json]:
        """Return the chunks that tell of an event."""
        index = event.choice
        made = []
        if index not in self._opened:
            self._opened.add(index)
            if (first := self._style.first(index)) is not None:
                made.append(self._chunk([first]))
        if isinstance(event, Finish):
            self._outputs[index].finish = event
            made.append(self._chunk([self._style.finish(index, finish_reason(event))]))
        elif event.text or event.logprobs:
            made.append(self._chunk([self._style.delta(index, event, self._offsets[index])]))
            self._offsets[index] += len(event.text)
        return made

    def last(self) -> list[Json]:
        """Return the chunks after the last event: counts and receipts, where wanted.

        Raises:
            InternalError: An output did not end.
        """
        finishes = self._finishes()
        if not (self._head.include_usage or self._head.receipts):
            return []
        chunk = self._chunk([])
        if self._head.include_usage:
            chunk["usage"] = self._usage(finishes)
        return [self._with_receipts(chunk, finishes)]

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        chunk = self._frame(self._style.chunk, choices)
        if self._head.include_usage:
            chunk["usage"] = None
        return chunk

    def _finishes(self) -> list[Finish]:
        finishes = [output.finish for output in self._outputs if output.finish is not None]
        if len(finishes) < len(self._outputs):
            raise InternalError("the pipeline ended before all outputs did")
        return finishes

    def _usage(self, finishes: Sequence[Finish]) -> Json:
        prompt = cached = 0
        for start in range(0, len(finishes), self._per_prompt):
            same = [finish.usage for finish in finishes[start : start + self._per_prompt]]
            prompt += same[0].prompt_tokens
            # Later outputs find the prompt in the cache because the first computed it.
            cached += min(usage.cached_tokens for usage in same)
        completion = sum(finish.usage.completion_tokens for finish in finishes)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _with_receipts(self, frame: Json, finishes: Iterable[Finish]) -> Json:
        if self._head.receipts:
            receipts = [asdict(finish.receipt) for finish in finishes]
            frame["radixmesh"] = (
                {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
            )
        return frame
