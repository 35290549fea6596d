"""The broadcast of a replica: what carries records from rank (0, 0) to the others and marks back.

An interface with one carrier now: `local`, over unix sockets, for ranks that share
a host. Rank (0, 0) holds a `Root`, every other rank a `Leaf`.
"""

from collections.abc import Sequence
from typing import Protocol

from worker.peers import PeerLost

__all__ = ["Leaf", "PeerLost", "Root"]


class Root(Protocol):
    """Rank (0, 0)'s end."""

    def hellos(self) -> Sequence[bytes]:
        """Wait for every other rank's first word, by rank number. Loading may take minutes.

        Raises:
            PeerLost: A rank ended before it was ready.
        """
        ...

    def broadcast(self, record: bytes) -> None:
        """Send the record to every other rank.

        Raises:
            PeerLost: A rank is gone, or took nothing within the deadline.
        """
        ...

    def marks(self) -> Sequence[int]:
        """Wait for every other rank's mark of the last record, by rank number.

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
        """Say the first word.

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
