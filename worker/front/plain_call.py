"""One request outside any link: the owner behind the plain `Generate` and the self-test.

Knows jobs; knows no wire. Its queue is bounded by the request's own prompt and max_tokens.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from radixmesh.blocks import split_run
from radixmesh.errors import MeshError
from worker.front.jobs import StepPart
from worker.request import GOES_ON, NO_TOPS, PromptScores, Tops


@dataclass(frozen=True, slots=True)
class Piece:
    """New ids of an output, or scores of its prompt. `finish` is 0 while it goes on."""

    ids: bytes
    logprobs: list[float]
    finish: int
    cached_tokens: int
    tops: Tops = NO_TOPS
    prompt_scores: tuple[PromptScores, ...] = ()
    weight_version: str = ""  # of the weights that chose the ids


class PlainCall:
    """Collects what one job reports."""

    def __init__(self, *, logprobs: bool = False) -> None:
        self._logprobs = logprobs
        self._cached_tokens = 0
        self._news: asyncio.Queue[Piece | MeshError] = asyncio.Queue()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Yield pieces up to the one that finishes. Raises the job's typed error."""
        while True:
            news = await self._news.get()
            if isinstance(news, MeshError):
                raise news
            yield news
            if news.finish != GOES_ON:
                return

    def on_step(self, dp_rank: int, part: StepPart) -> None:
        """Queue what is new."""
        del dp_rank
        for started in part.started:
            self._cached_tokens = started.cached_tokens
        if part.prompt_scores:
            scores = tuple(part.prompt_scores)
            self._news.put_nowait(
                Piece(b"", [], GOES_ON, self._cached_tokens, prompt_scores=scores)
            )
        runs = split_run(part.token_ids, part.counts)
        for ids, finish in zip(runs, part.finishes, strict=True):
            logprobs = list(part.logprobs) if self._logprobs else []
            piece = Piece(
                ids,
                logprobs,
                finish,
                self._cached_tokens,
                part.tops,
                weight_version=part.weight_version,
            )
            self._news.put_nowait(piece)

    def on_failed(self, entry_id: int, error: MeshError) -> None:
        """Queue the failure."""
        del entry_id
        self._news.put_nowait(error)

    def on_seen(self, dp_rank: int, entry_id: int) -> None:
        """Nothing to learn: a plain call watches no load."""
