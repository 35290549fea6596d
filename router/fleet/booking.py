"""A booked place: the load and the in-flight prefix that one request puts on a replica.

Both go exactly once, whoever releases first: the request's owner, the end of its
last entry, the loss of its replica, or the lease of a booking never sent.
"""

from collections.abc import Callable
from dataclasses import dataclass

from router.fleet.breaker import Outcome, outcome_of
from router.fleet.views import CandidatePrice
from router.fleet.workload import Charge
from router.tree.marks import Marks


@dataclass(slots=True, eq=False, kw_only=True)
class Booking:
    """A place at one replica, as predicted when it was chosen.

    Attributes:
        price: What was expected when it was chosen.
        possible_blocks: The most that any replica held or was about to hold of the prompt.
        policy: What chose.
        on_outcome: Told what becomes of the request: what it says of the replica.
        silent_s: Says for how many seconds, since it was booked, nothing has shown that the
            replica works.
        answered: Whether it has brought ids.
        released: Whether it counts no more.
    """

    group_id: str
    dp_rank: int
    incarnation: int
    price: CandidatePrice
    possible_blocks: int
    policy: str
    booked_at: float
    charge: Charge
    marks: Marks
    on_release: Callable[["Booking"], None]
    on_cached: Callable[[int], None]
    on_outcome: Callable[[Outcome], None] = lambda _: None
    silent_s: Callable[[], float] = lambda: 0.0
    open_entries: int = 0
    answered: bool = False
    released: bool = False

    @property
    def block_tokens(self) -> int:
        """Ids of a block there."""
        return self.price.block_tokens

    @property
    def prompt_blocks(self) -> int:
        """Whole blocks of the prompt."""
        return self.price.prompt_blocks

    @property
    def predicted_blocks(self) -> int:
        """Blocks of the prompt that the router expects to be found."""
        return self.price.matched_blocks

    @property
    def predicted_first_s(self) -> float:
        """Seconds until the first id, as predicted: the wait and the prefill."""
        return self.price.wait_s + self.price.prefill_s

    def release(self) -> None:
        """Take load and marks back; what becomes of the request says nothing more. Idempotent."""
        if self.released:
            return
        self.released = True
        self.marks.release()
        self.on_outcome(Outcome.NOTHING)
        self.on_release(self)

    def entry_opened(self, entry_id: int) -> None:
        """One of its entries is on the link."""
        self.open_entries += 1
        self.charge.entry_ids.append(entry_id)

    def started(self, cached_tokens: int) -> None:
        """The prefill of one of its entries began; so many prompt ids were reused."""
        self.charge.started = True
        self.on_cached(cached_tokens)

    def began(self) -> None:
        """One of its entries brought ids. Idempotent."""
        if not self.answered:
            self.answered = True
            self.on_outcome(Outcome.BEGAN)

    def finished(self) -> None:
        """One of its entries ended well."""
        self.on_outcome(Outcome.FINISHED)

    def failed(self, reason: str) -> None:
        """One of its entries ended by an error, known by its reason."""
        self.on_outcome(outcome_of(reason))

    def entry_closed(self) -> None:
        """One of its entries ended; with the last one the booking does."""
        self.open_entries -= 1
        if not self.open_entries:
            self.release()
