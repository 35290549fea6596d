"""Where a rank stands in its group: rank number <-> (dp, pp, tp). Pure arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """Coordinates of a rank in its group."""

    dp_rank: int
    pp_rank: int
    tp_rank: int

    def __str__(self) -> str:
        return f"dp={self.dp_rank} pp={self.pp_rank} tp={self.tp_rank}"


@dataclass(frozen=True, slots=True)
class Topology:
    """`dp` replicas of `pp` stages of `tp` ranks. Numbers run tp fastest, then pp, then dp.

    Each of `nnodes` hosts has the same number of consecutive tp ranks of every stage.

    Raises:
        ValueError: A dimension is below 1, or the tp ranks of a stage can't be shared evenly.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    nnodes: int = 1

    def __post_init__(self) -> None:
        if min(self.dp, self.pp, self.tp, self.nnodes) < 1:
            raise ValueError(f"every dimension is at least 1, got {self}")
        if self.tp % self.nnodes:
            raise ValueError(f"tp {self.tp} is not a multiple of nnodes {self.nnodes}")

    @property
    def replica_size(self) -> int:
        """Ranks of one replica."""
        return self.pp * self.tp

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.dp * self.replica_size

    def number(self, place: Place) -> int:
        """Return the number of a place in the group.

        Raises:
            ValueError: There is no such place.
        """
        inside = (
            0 <= place.dp_rank < self.dp
            and 0 <= place.pp_rank < self.pp
            and 0 <= place.tp_rank < self.tp
        )
        if not inside:
            raise ValueError(f"{place} is not in {self}")
        return (place.dp_rank * self.pp + place.pp_rank) * self.tp + place.tp_rank

    def place(self, number: int) -> Place:
        """Return the place of a number in the group.

        Raises:
            ValueError: There is no such rank.
        """
        if not 0 <= number < self.size:
            raise ValueError(f"rank {number} is not in {self}")
        rest, tp_rank = divmod(number, self.tp)
        dp_rank, pp_rank = divmod(rest, self.pp)
        return Place(dp_rank, pp_rank, tp_rank)

    def replica(self, dp_rank: int) -> Iterator[Place]:
        """Yield the places of one replica by number; the first is (0, 0)."""
        first = dp_rank * self.replica_size
        return (self.place(first + offset) for offset in range(self.replica_size))

    def node(self, place: Place) -> int:
        """Return the host that runs the rank at a place."""
        return place.tp_rank * self.nnodes // self.tp

    def device(self, place: Place) -> int:
        """Return a rank's number among those of its host: which accelerator it takes."""
        here = self.tp // self.nnodes
        return (place.dp_rank * self.pp + place.pp_rank) * here + place.tp_rank % here

    def share(self, dp_rank: int, node_rank: int) -> list[Place]:
        """Return a host's places of one replica, by number."""
        return [place for place in self.replica(dp_rank) if self.node(place) == node_rank]
