"""What an output's lost attempts mean for the next one: where not to go, when to give up.

Pure: knows errors and places; no clock, no fleet.
"""

from dataclasses import dataclass

from radixmesh.errors import RESUMABLE, GroupLost, MeshError, RequestPoisoned, Unavailable
from radixmesh.waits import Growing

# A replica in one of its lives: group, dp_rank, incarnation.
Place = tuple[str, int, int]

# The replica itself is gone; it may have been this request that took it down.
TAKEN_DOWN = frozenset({"GROUP_LOST", "RANK_DESYNC"})
# In this life it takes nothing any more. A link that was cut says nothing of the replica behind it.
GONE = TAKEN_DOWN | {"DRAINING"}
# The place takes no more work, now or ever; nothing is wrong with it.
FULL = frozenset({"QUEUE_FULL", "LINK_OVERLOADED"})
# Suspicion at which a request counts as poison: two replicas that died of it at once, or more
# that died after it had run there for a while, which it most likely only witnessed.
POISON = 2.0
WITNESS_IDS = 8
# New work is refused after so many places were full, or so many attempts led nowhere.
FULL_LIMIT = 2
FRUITLESS_LIMIT = 6
PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
_PAUSES = Growing(PAUSE_S, MAX_PAUSE_S)


class NoSignOfLife(GroupLost):
    """A replica showed nothing for too long; the router gave the attempt up. For this router only.

    A client that hears of it has seen `GROUP_LOST`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How one attempt ended without ending its output.

    Attributes:
        sent: It had left for the replica.
        accepted: The replica had queued it.
        started: Its prefill had begun.
        gained: Ids that it brought.
    """

    place: Place
    error: MeshError
    sent: bool = False
    accepted: bool = False
    started: bool = False
    gained: int = 0


class Retries:
    """The memory of one output about its lost attempts."""

    def __init__(self) -> None:
        self.resuming = False
        self._dead: set[Place] = set()
        self._full: set[Place] = set()
        self._odd: set[Place] = set()
        self._erred = False
        self._suspicion = 0.0
        self._fruitless = 0
        self._last: MeshError | None = None

    def __repr__(self) -> str:
        return (
            f"<Retries dead {sorted(self._dead)}, full {sorted(self._full)}, "
            f"{self._fruitless} fruitless>"
        )

    @property
    def avoid(self) -> frozenset[Place]:
        """Places that the next attempt must not go to."""
        return frozenset(self._dead | self._full | self._odd)

    def reason(self, nobody: MeshError) -> MeshError:
        """Return what to say when the wait for a place is over: that all were full, or `nobody`."""
        full = self._last is not None and self._last.reason in FULL
        return self._last if full and self._last is not None else nobody

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt; none before the first retry."""
        return _PAUSES.seconds(self._fruitless - 1)

    def note(self, loss: Loss) -> None:
        """Take a lost attempt into account.

        Raises:
            RequestPoisoned: Replicas seem to die of this request.
            MeshError: The loss's own error, when no other attempt could help.
        """
        reason = loss.error.reason
        if not _elsewhere_may_help(loss.error) and not self._pardons(loss):
            raise loss.error
        self._last = loss.error
        self.resuming = self.resuming or loss.accepted or loss.gained > 0
        self._fruitless = 0 if loss.gained else self._fruitless + 1
        self._note_place(loss)
        self._suspicion += _suspicion(loss)
        if self._suspicion >= POISON:
            raise RequestPoisoned("replicas die of the request", last=reason)
        if not self.resuming and self._fruitless >= FRUITLESS_LIMIT:
            raise loss.error

    def _pardons(self, loss: Loss) -> bool:
        """Whether it was a bug in taking the request: once it may have been that replica's own."""
        pardoned = loss.error.reason == "INTERNAL" and not loss.accepted and not self._erred
        self._erred = self._erred or pardoned
        return pardoned

    def _note_place(self, loss: Loss) -> None:
        if loss.gained:
            self._full.clear()
            self._odd.clear()
        if isinstance(loss.error, NoSignOfLife) or loss.error.reason == "INTERNAL":
            # It may work for others, or again: it is gone to where there is no other.
            self._odd.add(loss.place)
        elif loss.error.reason in FULL:
            self._full.add(loss.place)
            if not self.resuming and len(self._full) >= FULL_LIMIT:
                raise loss.error
        elif loss.error.reason in GONE:
            self._dead.add(loss.place)

    def shuns(self, place: Place) -> bool:
        """Whether not to go to a place though there is no other: it is dead, or full for new work.

        An interrupted stream tries a full place again, after a pause.
        """
        return place in self._dead or (place in self._full and not self.resuming)

    def check_room(self) -> None:
        """Refuse new work that found only full places.

        Raises:
            MeshError: What the full place said.
        """
        if self._full and not self.resuming and self._last is not None:
            raise self._last


def _elsewhere_may_help(error: MeshError) -> bool:
    return isinstance(error, Unavailable) or error.reason in RESUMABLE or error.reason in FULL


def _suspicion(loss: Loss) -> float:
    """How likely it was this request that its replica died of."""
    silenced = isinstance(loss.error, NoSignOfLife)
    if loss.error.reason in TAKEN_DOWN and loss.sent and not silenced:
        # Not only after it was accepted: a replica may die in the step that would say so.
        return 1.0 if loss.gained < WITNESS_IDS else 0.5
    cut = silenced or loss.error.reason == "LINK_LOST"
    died_at_once = cut and loss.started and not loss.gained
    return 0.5 if died_at_once else 0.0
