"""One request, from end to end: admit, tokenize, choose, generate, detokenize, deliver, resume.

The way of an id is synchronous (`router/output.py`); this is what drives it. One
task supervises a request and outlives no request: it makes the plan, gives each
output a detokenizer and a replica, and gives it others when they are lost. The
client's side only takes what waits in the stream. Whatever happens to either side,
at any moment, ends in the same `finally`.
"""

import asyncio
import logging
import random
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, repeat

from radixmesh.errors import (
    DeadlineExceeded,
    InternalError,
    LinkLost,
    MeshError,
    ModelNotServed,
    NoReplicaReady,
    TokenizerMismatch,
)
from router.attempt import place_of
from router.beat import Beat
from router.checks import check
from router.fleet.ask import ModelInfo
from router.fleet.booking import Booking
from router.fleet.views import CandidatePrice
from router.output import OnLoss, Output, Silences
from router.plan import Home, Plan, Planner
from router.ports import Admit, Fleet, Permit, Texts
from router.reader import HELD_IDS
from router.request import Event, GenerateRequest
from router.stream import Stream

logger = logging.getLogger(__name__)

PLACE_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times and defaults of the pipeline.

    Attributes:
        request_timeout_s: Deadline of requests that bring none, and bound of those that do.
        ready_wait_s: How long new work waits for a replica to be ready.
        text_wait_s: How long new work waits for a detokenizer to be connected.
        resume_wait_s: How long a stream that lost its place waits for another.
        attempt_timeout_s: How long a replica may show no sign of life, at least; 0: for ever.
        text_timeout_s: How long a detokenizer that owes text may be silent.
        stream_interval_s: How long deltas after the first are merged; 0: every step.
        max_pending_bytes: Text that one output may have waiting for a slow client.
        default_max_tokens: Output limit of requests that bring none.
    """

    request_timeout_s: float = 600.0
    ready_wait_s: float = 5.0
    text_wait_s: float = 5.0
    resume_wait_s: float = 30.0
    attempt_timeout_s: float = 90.0
    text_timeout_s: float = 15.0
    stream_interval_s: float = 0.03
    max_pending_bytes: int = 1 << 20
    default_max_tokens: int = 512


@dataclass(slots=True, eq=False)
class _Call:
    """A request on its way."""

    request: GenerateRequest
    deadline: float
    stream: Stream
    permit: Permit
    # Whether any replica has been sent any of it.
    sent: bool = False
    outputs: list[Output] = field(default_factory=list)
    # The replica of its first output; the others of the same request share blocks there.
    home: Home | None = None

    @property
    def remaining_s(self) -> float:
        return self.deadline - asyncio.get_running_loop().time()

    def used(self, prompt_tokens: int) -> int:
        """Tokens that it has cost so far: none before a replica got it."""
        generated = sum(output.journal.completion_tokens for output in self.outputs)
        return prompt_tokens + generated if self.sent else 0


class Pipeline:
    """Runs requests.

    Args:
        fleet: The replicas.
        texts: Tokenizers and detokenizers.
        admit: Holds a permit while a request's stream is open.
        rng: Draws seeds.
        on_loss: Told the service (worker, detokenizer) and reason of every loss.
    """

    def __init__(
        self,
        fleet: Fleet,
        *,
        texts: Texts,
        admit: Admit,
        pace: Pace,
        rng: random.Random,
        on_loss: OnLoss,
    ) -> None:
        self._fleet = fleet
        self._decoder = texts.decoder
        self._admit = admit
        self._pace = pace
        self._silences = Silences(pace.attempt_timeout_s, pace.text_timeout_s)
        self._beat = Beat(pace.stream_interval_s)
        self._on_loss = on_loss
        self._planner = Planner(
            fleet,
            texts.encoder,
            ready_wait_s=pace.ready_wait_s,
            default_max_tokens=pace.default_max_tokens,
            rng=rng,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: set[_Call] = set()

    def models(self) -> Sequence[ModelInfo]:
        """Return the served models."""
        return self._fleet.models()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """Run a request; closing the generator, at any moment, frees all that it holds.

        Yields:
            Deltas of its outputs, and for each output, last, one Finish.

        Raises:
            MeshError: It can't be served, or could not be finished.
        """
        check(request)
        timeout_s = self._timeout(request)
        deadline = asyncio.get_running_loop().time() + timeout_s
        admitted = self._admit(timeout_s, priority=request.priority, tenant=request.tenant)
        async with admitted as permit:
            call = _Call(request, deadline, self._stream(), permit)
            self._calls.add(call)
            supervisor = asyncio.create_task(self._supervise(call))
            self._tasks.add(supervisor)
            supervisor.add_done_callback(self._tasks.discard)
            try:
                while events := await call.stream.take():
                    for event in events:
                        yield event
            finally:
                self._calls.discard(call)
                call.stream.close()
                supervisor.cancel()
                await asyncio.wait([supervisor])

    def end(self, error: MeshError) -> None:
        """End all running requests by an error, which their clients are told."""
        for call in list(self._calls):
            call.stream.fail(error)

    async def explain(self, request: GenerateRequest) -> tuple[int, Sequence[CandidatePrice]]:
        """Return the number of prompt ids and every replica's price; sends nothing to any.

        Raises:
            MeshError: As `generate` would, before it sends anything.
        """
        check(request)
        timeout_s = self._timeout(request)
        try:
            async with asyncio.timeout(timeout_s):
                plan = await self._planner.plan(request, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed") from None
        return plan.prompt_tokens, self._fleet.explain(plan.ask())

    def _timeout(self, request: GenerateRequest) -> float:
        limit = self._pace.request_timeout_s
        return limit if request.timeout_s is None else min(limit, request.timeout_s)

    def _stream(self) -> Stream:
        return Stream(beat=self._beat, max_pending_bytes=self._pace.max_pending_bytes)

    # The supervisor of one request

    async def _supervise(self, call: _Call) -> None:
        try:
            async with asyncio.timeout_at(call.deadline):
                await self._run(call)
            call.stream.end()
        except TimeoutError:
            call.stream.fail(DeadlineExceeded("the deadline passed"))
        except MeshError as error:
            call.stream.fail(error)
        except Exception:
            error_id = uuid.uuid4().hex[:12]
            logger.exception("request failed by a bug", extra={"error_id": error_id})
            call.stream.fail(InternalError(f"internal error {error_id}"))
        finally:
            for output in call.outputs:
                output.free()

    async def _run(self, call: _Call) -> None:
        plan = await self._planner.plan(call.request, call.remaining_s)
        most = plan.prompt_tokens + call.request.choices * (plan.sampling.max_tokens or 1)
        await call.permit.take_tokens(most, used=partial(call.used, plan.prompt_tokens))
        for choice in range(call.request.choices):
            call.outputs.append(self._output(choice, call, plan))
        if len(call.outputs) == 1:
            await self._drive(call.outputs[0], call, plan)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for output in call.outputs:
                    tasks.create_task(self._drive(output, call, plan))
        except ExceptionGroup as group:
            # The first to fail ends the request; the others were cancelled.
            raise group.exceptions[0] from None

    def _output(self, choice: int, call: _Call, plan: Plan) -> Output:
        return Output(
            choice,
            plan.journal(),
            call.stream,
            prompt_tokens=plan.prompt_tokens,
            seed=plan.sampling.seed or 0,
            on_loss=self._on_loss,
        )

    # One output: a reader and an attempt, and others when they are lost

    async def _drive(self, output: Output, call: _Call, plan: Plan) -> None:
        while output.going_on:
            if output.reader is None:
                await self._read(output, plan)
            elif output.attempt is None and not output.journal.complete:
                await self._attempt(output, call, plan)
            else:
                await self._watch(output)

    async def _watch(self, output: Output) -> None:
        """Return when an output needs attention; leave whom it waits for if they are silent."""
        try:
            async with asyncio.timeout(output.due_s(self._silences)):
                await output.changed()
        except TimeoutError:
            output.leave_silent(self._silences)

    async def _read(self, output: Output, plan: Plan) -> None:
        """Give an output a detokenizer and replay to it what there is."""
        pace = self._pace
        wait_s = pace.resume_wait_s if output.reader_losses else pace.text_wait_s
        longest = max((len(stop.encode()) for stop in plan.request.stop), default=0)
        reader = output.begin_reader(held_ids=HELD_IDS + longest)
        try:
            reader.entry = await self._decoder.open(
                reader, plan.options, plan.serving, wait_s=wait_s
            )
        except LinkLost as error:
            # It went in the moment between choice and use.
            output.lose_reader(reader, error)
            return
        reader.forward(output.journal)

    async def _attempt(self, output: Output, call: _Call, plan: Plan) -> None:
        """Give an output a replica and submit what is missing to it."""
        for loss in output.take_losses():
            output.retries.note(loss)
        booking = await self._place(output, call, plan)
        if booking is None:
            return
        attempt = output.begin_attempt(booking)
        call.home = call.home or (booking.group_id, booking.dp_rank)
        spec = plan.spec(output, call.remaining_s)
        try:
            attempt.ticket = self._fleet.submit(booking, spec, attempt)
            call.sent = True
        except MeshError as error:
            output.lose_attempt(attempt, error)

    async def _place(self, output: Output, call: _Call, plan: Plan) -> Booking | None:
        """Book a replica, now or as soon as one is ready; None when the output ended meanwhile."""
        retries = output.retries
        wait_s = self._pace.resume_wait_s if retries.resuming else self._pace.ready_wait_s
        reason: MeshError = NoReplicaReady("no replica is ready", model=plan.model.name)
        pauses = _pauses(retries.pause_s)
        booking: Booking | None = None
        try:
            async with output.patience.waiting(wait_s):
                while booking is None:
                    await _pause(next(pauses))
                    try:
                        booking = self._book(output, call, plan)
                    except NoReplicaReady as error:
                        reason = error
                    except (ModelNotServed, TokenizerMismatch):
                        # It was served when the stream began, and may be again.
                        if not retries.resuming:
                            raise
                    if booking is None:
                        await self._fleet.wait_ready(plan.model.name, resume=retries.resuming)
        except TimeoutError:
            if output.going_on:
                raise retries.reason(reason) from None
        return booking

    def _book(self, output: Output, call: _Call, plan: Plan) -> Booking | None:
        booking = self._fleet.place(plan.ask(output, call.home))
        if not output.retries.shuns(place_of(booking)):
            return booking
        booking.release()
        output.retries.check_room()
        return None


def _pauses(first_s: float) -> Iterator[float]:
    """Seconds before each try for a place: none after a wait, then some, so as not to spin."""
    return chain((first_s, 0.0), repeat(PLACE_PAUSE_S))


async def _pause(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)
