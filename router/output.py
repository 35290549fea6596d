"""One output: its journal, the attempt that brings ids, the reader that brings text.

Everything here is a synchronous callback: ids come in from a worker's link, go to
the journal and on to the detokenizer's link; text comes back and waits for the
client. No task and no queue per token. Whatever a callback cannot settle (a lost
attempt, a lost reader, an error) is left for the task that drives the output.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from radixmesh.errors import RESUMABLE, GroupLost, MeshError, ServiceUnavailable
from router.attempt import Attempt
from router.fleet.booking import Booking
from router.journal import Ending, Journal, Verdict
from router.patience import Patience
from router.reader import HELD_IDS, Reader
from router.request import Finish, FinishReason, Receipt, Usage
from router.retries import Loss, NoSignOfLife, Retries
from router.stream import Stream

# The service that was lost (worker, detokenizer), and the reason.
OnLoss = Callable[[str, str], None]

# A detokenizer that is lost so often without one id of progress is not the one at fault.
READER_LOSSES_LIMIT = 4
# What a loss is called of which no error told.
ATTEMPT_TIMEOUT = "ATTEMPT_TIMEOUT"


@dataclass(frozen=True, slots=True)
class Silences:
    """For how long a silence is borne.

    Attributes:
        attempt_s: Without a sign of life of the replica; 0: for ever.
        text_s: Of a detokenizer that owes text.
    """

    attempt_s: float
    text_s: float


class Output:
    """One output (choice) and all that it holds.

    Args:
        choice: Its index.
        journal: New.
        stream: Where text and the end go.
        prompt_tokens: For its usage.
        seed: For its receipt.
        on_loss: Told of every lost attempt and reader.
    """

    def __init__(
        self,
        choice: int,
        journal: Journal,
        stream: Stream,
        *,
        prompt_tokens: int,
        seed: int,
        on_loss: OnLoss,
    ) -> None:
        self.choice = choice
        self.journal = journal
        self.retries = Retries()
        self.patience = Patience()
        self.attempt: Attempt | None = None
        self.reader: Reader | None = None
        self._losses: list[Loss] = []
        self.reader_losses = 0
        self._stream = stream
        self._prompt_tokens = prompt_tokens
        self._seed = seed
        self._on_loss = on_loss
        self._first: Attempt | None = None
        self._last: Attempt | None = None
        self._places = 0
        self._error: MeshError | None = None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Output {self.choice} {self.journal!r} {self.retries!r}>"

    @property
    def ended(self) -> bool:
        """Whether its last event has been handed to the stream."""
        return self.journal.ending is not None

    @property
    def going_on(self) -> bool:
        """Whether it has not ended yet.

        Raises:
            MeshError: It failed.
        """
        if self._error is not None:
            raise self._error
        return not self.ended

    async def changed(self) -> None:
        """Return when something needs the driver's attention."""
        await self._changed.wait()
        self._changed.clear()

    def take_losses(self) -> list[Loss]:
        """Return the attempts that were lost since the last call."""
        losses, self._losses = self._losses, []
        return losses

    def begin_attempt(self, booking: Booking) -> Attempt:
        """Return a new attempt at a booked place; it is the only one that is heard."""
        number = self.journal.begin_attempt()
        self.attempt = Attempt(self, booking, number=number, position=self.journal.position)
        return self.attempt

    def begin_reader(self, *, held_ids: int = HELD_IDS) -> Reader:
        """Return a new reader; it is the only one that is heard. It may hold back so many ids."""
        self.reader = Reader(self, number=self.journal.begin_reader(), held_ids=held_ids)
        return self.reader

    def due_s(self, silences: Silences) -> float | None:
        """Return in how many seconds to look who is silent; None while nobody is waited for."""
        attempt = self.attempt.due_s(silences.attempt_s) if self.attempt else None
        reader = self.reader.due_s(silences.text_s) if self.reader else None
        return min((due for due in (attempt, reader) if due is not None), default=None)

    def leave_silent(self, silences: Silences) -> None:
        """Give up an attempt or a reader that owes something and was silent for too long."""
        attempt, reader = self.attempt, self.reader
        due_s = attempt.due_s(silences.attempt_s) if attempt else None
        if attempt is not None and due_s is not None and due_s <= 0:
            attempt.booking.failed(NoSignOfLife.reason)
            attempt.free()
            # It did not wait for a place all the time; it does from now on.
            self.patience.renew()
            self.lose_attempt(attempt, NoSignOfLife("the replica showed no sign of life"))
        due_s = reader.due_s(silences.text_s) if reader else None
        if reader is not None and due_s is not None and due_s <= 0:
            reader.give_up()
            self.lose_reader(reader, ServiceUnavailable("a detokenizer owed text and was silent"))

    # The worker's side

    def note_accepted(self) -> None:
        """It has a place."""
        self._places += 1
        self.patience.renew()

    def note_started(self, attempt: Attempt) -> None:
        """Keep the first attempt that ran: what usage and receipt count is about it."""
        if self._first is None:
            self._first = attempt

    def take_ids(
        self, attempt: Attempt, position: int, ids: bytes, logprobs: Sequence[float], finish: int
    ) -> None:
        """Journal ids and send them on."""
        verdict = self.journal.take_ids(attempt.number, position, ids, logprobs, finish)
        if verdict is Verdict.DROPPED:
            return
        if verdict is Verdict.GAP:
            attempt.booking.failed(GroupLost.reason)
            attempt.free()
            self.lose_attempt(attempt, GroupLost("a replica sent ids that can't be"))
            return
        self._last = attempt
        if self.reader is not None:
            self.reader.forward(self.journal)
        if self.journal.complete:
            self._drop_attempt()
            self._changed.set()

    def lose_attempt(self, attempt: Attempt, error: MeshError) -> None:
        """Leave a lost attempt to the driver."""
        if attempt is not self.attempt:
            return
        silent = isinstance(error, NoSignOfLife)
        self._on_loss("worker", ATTEMPT_TIMEOUT if silent else error.reason)
        if attempt.may_have_run(error):
            self._places += 1
        self.journal.fence()
        self._losses.append(attempt.loss(error, position=self.journal.position))
        self._drop_attempt()
        self._changed.set()

    def _drop_attempt(self) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.free()

    # The detokenizer's side

    def take_text(
        self, reader: Reader, text: str, consumed: int, token_bytes: Sequence[bytes]
    ) -> None:
        """Hand new text to the client."""
        try:
            fresh = self.journal.take_text(reader.number, text, consumed, token_bytes)
            if fresh:
                self.reader_losses = 0
                self._stream.add(self.choice, fresh)
        except MeshError as error:
            self.fail(error)

    def take_end(
        self,
        reader: Reader,
        tail: str,
        stop_matched: str,
        consumed: int,
        token_bytes: Sequence[bytes],
    ) -> None:
        """Hand the last text and the end to the client; stop the worker if it still runs."""
        try:
            fresh = self.journal.finish(
                reader.number,
                tail,
                consumed,
                stop_matched=stop_matched,
                token_bytes=token_bytes,
            )
            if fresh is None:
                return
            if fresh:
                self._stream.add(self.choice, fresh)
        except MeshError as error:
            self.fail(error)
            return
        self._stream.finish(self._finish())
        self.reader = None
        if self.attempt is not None:
            self.attempt.booking.finished()
        self._drop_attempt()
        self._changed.set()
        self.patience.cut_short()

    def lose_reader(self, reader: Reader, error: MeshError) -> None:
        """Leave a lost reader to the driver, or fail with it."""
        if reader is not self.reader:
            return
        self.reader = None
        reader.free()
        self._on_loss("detokenizer", error.reason)
        self.reader_losses += 1
        if error.reason not in RESUMABLE or self.reader_losses >= READER_LOSSES_LIMIT:
            self.fail(error)
            return
        self._changed.set()

    # The end

    def fail(self, error: MeshError) -> None:
        """End by an error; the driver raises it."""
        if self._error is None:
            self._error = error
            self.journal.end(Ending.FAILED)
            self.free()
            self._changed.set()
            self.patience.cut_short()

    def free(self) -> None:
        """Give up everything at workers and detokenizers; idempotent."""
        self.journal.end(Ending.CANCELLED)
        self._drop_attempt()
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.free()

    def _finish(self) -> Finish:
        return Finish(
            choice=self.choice,
            reason=self.journal.finish_reason or FinishReason.LENGTH,
            stop_matched=self.journal.stop_matched,
            usage=Usage(
                prompt_tokens=self._prompt_tokens,
                cached_tokens=self._first.cached_tokens if self._first else 0,
                completion_tokens=self.journal.completion_tokens,
            ),
            receipt=self._receipt(),
        )

    def _receipt(self) -> Receipt:
        first = self._first or self.attempt
        if first is None:
            return Receipt(seed=self._seed)
        last = self._last or first
        return first.receipt(last=last, places=max(self._places, 1), seed=self._seed)
