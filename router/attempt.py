"""One try at one replica: how far it came, how it ended, what it was predicted to cost.

Passes on what its worker link brings; knows nothing of text, and starts no other try.
"""

from collections.abc import Sequence
from typing import Protocol

from radixmesh.errors import LinkLost, MeshError
from router.fleet.booking import Booking
from router.ports import Ticket
from router.request import Receipt
from router.retries import Loss, Place

# A prefill may take this many times what was predicted before a silent replica is given up.
PREDICTED_TIMES = 3.0


def place_of(booking: Booking) -> Place:
    """Return the replica, in its present life, that a booking is at."""
    return (booking.group_id, booking.dp_rank, booking.incarnation)


class Hearer(Protocol):
    """Who is told what comes of an attempt; `router.output.Output`."""

    def note_accepted(self) -> None:
        """It has a place."""

    def note_started(self, attempt: "Attempt") -> None:
        """Its prefill began."""

    def take_ids(
        self, attempt: "Attempt", position: int, ids: bytes, logprobs: Sequence[float], finish: int
    ) -> None:
        """Ids came."""

    def lose_attempt(self, attempt: "Attempt", error: MeshError) -> None:
        """It is lost."""


class Attempt:
    """One try at one replica; the sink of its worker link.

    Args:
        output: Told what comes of it.
        booking: Where it goes.
        number: Its own, of the output's journal.
        position: How far the journal was when it began.
    """

    def __init__(self, output: Hearer, booking: Booking, *, number: int, position: int) -> None:
        self.booking = booking
        self.number = number
        self.position = position
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

    def due_s(self, silence_s: float) -> float | None:
        """Return in how many seconds at the earliest it is to be given up; None: never.

        A queue or prefill that takes long is no reason: while the replica makes steps, or
        its load changes, it is at work.
        """
        if not silence_s or self.ticket is None:
            return None
        borne_s = max(silence_s, PREDICTED_TIMES * self.booking.predicted_first_s)
        return borne_s - self.booking.silent_s()

    def may_have_run(self, error: MeshError) -> bool:
        """Whether it may have run though nobody heard so: it was sent, and its link is lost."""
        return self.ticket is not None and not self.accepted and error.reason == LinkLost.reason

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
