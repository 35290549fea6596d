"""One output: its journal, the attempt that brings ids, the reader that brings text.

Everything here is a synchronous callback: ids come in from a worker's link, go to
the journal and on to the detokenizer's link; text comes back and waits for the
client. No task and no queue per token. Whatever a callback cannot settle (a lost
attempt, a lost reader, an error) is left for the task that drives the output.
"""

import asyncio
from collections.abc import Callable, Sequence

from radixmesh.errors import RESUMABLE, GroupLost, MeshError
from router.fleet.booking import Booking
from router.journal import Ending, Journal, Verdict
from router.patience import Patience
from router.ports import TextEntry, Ticket
from router.request import Finish, FinishReason, Receipt, Usage
from router.retries import Loss, Place, Retries
from router.stream import Stream

# The service that was lost (worker, detokenizer), and the reason.
OnLoss = Callable[[str, str], None]

# A detokenizer that is lost so often without one id of progress is not the one at fault.
READER_LOSSES_LIMIT = 4


def place_of(booking: Booking) -> Place:
    """Return the replica, in its present life, that a booking is at."""
    return (booking.group_id, booking.dp_rank, booking.incarnation)


class Attempt:
    """One try at one replica; the sink of its worker link."""

    def __init__(self, output: "Output", booking: Booking) -> None:
        self.booking = booking
        self.number = output.journal.begin_attempt()
        self.position = output.journal.position
        self.ticket: Ticket | None = None
        self.accepted = False
        self.started = False
        self.cached_tokens = 0
        self.waited_s = 0.0
        self._output = output

    def on_accepted(self) -> None:
        """A replica has queued it."""
        if not self.accepted:
            self.accepted = True
            self._output.note_accepted()

    def on_started(self, cached_tokens: int, waited_s: float) -> None:
        """Its prefill began."""
        self.on_accepted()
        self.started = True
        self.cached_tokens = cached_tokens
        self.waited_s = waited_s
        self._output.note_started(self)

    def on_tokens(self, position: int, ids: bytes, logprobs: Sequence[float], finish: int) -> None:
        """Ids came."""
        self._output.take_ids(self, position, ids, logprobs, finish)

    def on_failed(self, error: MeshError, /) -> None:
        """The attempt is lost."""
        self._output.lose_attempt(self, error)

    def loss(self, error: MeshError, *, position: int) -> Loss:
        """Return how it ended, with the journal at `position`."""
        return Loss(
            place=place_of(self.booking),
            error=error,
            sent=self.ticket is not None,
            accepted=self.accepted,
            started=self.started,
            gained=position - self.position,
        )

    def receipt(self, *, last: "Attempt", places: int, seed: int) -> Receipt:
        """Return what it was predicted to cost and did.

        Args:
            last: The attempt that finished the output.
            places: That the output ran at.
            seed: What the draws were keyed by.
        """
        booking, price = self.booking, self.booking.price
        return Receipt(
            group_id=booking.group_id,
            dp_rank=booking.dp_rank,
            block_tokens=booking.block_tokens,
            prompt_blocks=booking.prompt_blocks,
            predicted_blocks=booking.predicted_blocks,
            actual_blocks=self.cached_tokens // booking.block_tokens,
            predicted_wait_s=price.wait_s,
            actual_wait_s=self.waited_s,
            policy=booking.policy,
            attempts=places,
            seed=seed,
            last_group_id=last.booking.group_id,
            last_dp_rank=last.booking.dp_rank,
            possible_blocks=booking.possible_blocks,
            held_blocks=price.held_blocks,
            view=price.view,
            price_s=price.total_s,
            prefill_s=price.prefill_s,
            alpha=price.alpha,
            crowding_s=price.crowding_s,
            eviction_s=price.eviction_s,
        )

    def free(self) -> None:
        """Give up its entry and its booking; idempotent."""
        if self.ticket is not None:
            self.ticket.cancel()
        self.booking.release()


class Reader:
    """One pass over the ids by one detokenizer; the sink of its link."""

    def __init__(self, output: "Output") -> None:
        self.number = output.journal.begin_reader()
        self.entry: TextEntry | None = None
        self.sent = 0
        self._output = output

    def on_piece(self, text: str, consumed: int, token_bytes: Sequence[bytes]) -> None:
        """Text became certain."""
        self._output.take_text(self, text, consumed, token_bytes)

    def on_done(
        self, tail: str, stop_matched: str, consumed: int, token_bytes: Sequence[bytes]
    ) -> None:
        """The text has ended."""
        self._output.take_end(self, tail, stop_matched, consumed, token_bytes)

    def on_failed(self, error: MeshError, /) -> None:
        """The detokenizer is lost, or refuses."""
        self._output.lose_reader(self, error)

    def forward(self, journal: Journal) -> None:
        """Send what the detokenizer has not seen yet, and the end if it is known."""
        if self.entry is None:
            return
        self.entry.feed(self.sent, journal.readable_ids(self.sent))
        self.sent = journal.readable
        if journal.complete:
            self.entry.end()

    def free(self) -> None:
        """Give up its entry; idempotent."""
        if self.entry is not None:
            self.entry.cancel()


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
        self.attempt = Attempt(self, booking)
        return self.attempt

    def begin_reader(self) -> Reader:
        """Return a new reader; it is the only one that is heard."""
        self.reader = Reader(self)
        return self.reader

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
            attempt.free()
            self.lose_attempt(attempt, GroupLost("a replica skipped an output position"))
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
        self._on_loss("worker", error.reason)
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
        self._drop_attempt()
        self._changed.set()
        self.patience.cut_short()

    def lose_reader(self, reader: Reader, error: MeshError) -> None:
        """Leave a lost reader to the driver, or fail with it."""
        if reader is not self.reader:
            return
        self.reader = None
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
