"""What is counted of requests. Wraps the pipeline; changes nothing."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

from radixmesh.blocks import ID_BYTES
from radixmesh.errors import InternalError, MeshError
from radixmesh.telemetry.metrics import RouterMetrics
from router.fleet.ask import ModelInfo
from router.pipeline import Pipeline
from router.request import Delta, Event, Finish, GenerateRequest

FINISHED: Final = "finished"
CANCELLED: Final = "cancelled"


class Metered:
    """A pipeline of which every request is counted once, however it ends.

    Args:
        pipeline: Runs requests.
        metrics: Where they are counted.
        edge: `grpc` or `http`.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        metrics: RouterMetrics,
        *,
        edge: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipeline = pipeline
        self._metrics = metrics
        self._edge = edge
        self._clock = clock

    def models(self) -> Sequence[ModelInfo]:
        """Return the served models."""
        return self._pipeline.models()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """Run a request; see `Pipeline.generate`."""
        record = _Record(self._metrics, self._clock)
        outcome = InternalError.reason
        try:
            async with aclosing(self._pipeline.generate(request)) as events:
                async for event in events:
                    record.note(event)
                    yield event
            outcome = FINISHED
        except (GeneratorExit, asyncio.CancelledError):
            outcome = CANCELLED
            raise
        except MeshError as error:
            outcome = error.reason
            raise
        finally:
            self._metrics.requests.labels(self._edge, outcome).inc()
            record.end()


class _Record:
    """What one request adds to the metrics."""

    def __init__(self, metrics: RouterMetrics, clock: Callable[[], float]) -> None:
        self._metrics = metrics
        self._clock = clock
        self._began_at = clock()
        self._delivered_at: dict[int, float] = {}
        self._first_finish = True

    def note(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._note_delta(event)
        else:
            self._note_finish(event)

    def _note_delta(self, delta: Delta) -> None:
        now = self._clock()
        count = len(delta.ids) // ID_BYTES
        before = self._delivered_at.get(delta.choice)
        if not self._delivered_at:
            self._metrics.first_token_seconds.observe(now - self._began_at)
        if before is not None and count:
            self._metrics.inter_token_seconds.observe((now - before) / count)
        self._delivered_at[delta.choice] = now
        self._metrics.completion_tokens.inc(count)

    def _note_finish(self, finish: Finish) -> None:
        if not self._first_finish:
            # All outputs have the same prompt.
            return
        self._first_finish = False
        usage, receipt = finish.usage, finish.receipt
        self._metrics.prompt_tokens.inc(usage.prompt_tokens)
        self._metrics.prompt_size_tokens.observe(usage.prompt_tokens)
        self._metrics.cached_tokens.inc(usage.cached_tokens)
        self._metrics.predicted_tokens.inc(receipt.predicted_blocks * receipt.block_tokens)
        self._metrics.possible_tokens.inc(receipt.possible_blocks * receipt.block_tokens)

    def end(self) -> None:
        self._metrics.request_seconds.observe(self._clock() - self._began_at)
