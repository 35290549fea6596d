"""The broadcast of a replica: what carries records from rank (0, 0) to the others and marks back.

An interface with two carriers: `local` over unix sockets, for ranks that share a host,
and `gloo` across hosts. Rank (0, 0) holds a `Root`, every other rank a `Leaf`. A rank is
known by its number in the replica. What is sent waits for nobody: ranks of later pipeline
stages may be some steps behind rank (0, 0).
"""

from collections.abc import Sequence
from typing import Protocol

from worker.peers import PeerLost

__all__ = ["Leaf", "PeerLost", "Root"]


class Root(Protocol):
    """Rank (0, 0)'s end."""

    def hellos(self) -> Sequence[bytes]:
        """Wait for every other rank's next word, by rank number. Loading may take minutes.

        All marks must have been read.

        Raises:
            PeerLost: A rank ended before it said one.
        """
        ...

    def broadcast(self, record: bytes) -> None:
        """Send the record to every other rank.

        Raises:
            PeerLost: A rank is gone, or took nothing within its deadline.
        """
        ...

    def marks(self, ranks: Sequence[int], timeout_s: float | None = None) -> Sequence[int]:
        """Wait for the next unread mark of each of these ranks; one deadline for all.

        A rank gives one mark for each record, in the order of the records. None means the
        deadline that all waiting for ranks has. When it raises, nothing is known of which
        marks were read.

        Raises:
            PeerLost: A rank is gone, or gave none within the deadline.
        """
        ...

    def close(self) -> None:
        """Let go of all."""
        ...


class Leaf(Protocol):
    """Any other rank's end."""

    def hello(self, word: bytes) -> None:
        """Say a word to rank (0, 0), before the first record or when all marks were read.

        Raises:
            PeerLost: Rank (0, 0) is gone.
        """
        ...

    def receive(self) -> bytes:
        """Wait, for ever, for the next record.

        Raises:
            PeerLost: Rank (0, 0) is gone.
        """
        ...

    def mark(self, value: int) -> None:
        """Answer the last record with 64 bits.

        Raises:
            PeerLost: Rank (0, 0) is gone.
        """
        ...

    def close(self) -> None:
        """Let go."""
        ...
