"""One pass over an output's ids by one detokenizer: what it was sent, what it still owes.

Passes on what the detokenizer's link brings; knows nothing of workers.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from radixmesh.errors import MeshError
from router.journal import Journal
from router.ports import TextEntry

# A detokenizer holds back unfinished characters; with stop strings, as much as their length.
HELD_IDS = 64


class Hearer(Protocol):
    """Who is told what comes of a reader; `router.output.Output`."""

    def take_text(
        self, reader: "Reader", text: str, consumed: int, token_bytes: Sequence[bytes]
    ) -> None:
        """Text became certain."""

    def take_end(
        self,
        reader: "Reader",
        tail: str,
        stop_matched: str,
        consumed: int,
        token_bytes: Sequence[bytes],
    ) -> None:
        """The text has ended."""

    def lose_reader(self, reader: "Reader", error: MeshError) -> None:
        """It is lost, or refuses."""


class Reader:
    """One pass over the ids by one detokenizer; the sink of its link.

    Args:
        output: Told what comes of it.
        number: Its own, of the output's journal.
        held_ids: So many the detokenizer may hold back.
    """

    def __init__(self, output: Hearer, *, number: int, held_ids: int) -> None:
        self.number = number
        self.entry: TextEntry | None = None
        self.sent = 0
        self._consumed = 0
        self._held_ids = held_ids
        self._ended = False
        self._clock = asyncio.get_running_loop().time
        self._owes_since = 0.0
        self._output = output

    def on_piece(self, text: str, consumed: int, token_bytes: Sequence[bytes]) -> None:
        """Text became certain."""
        self._consumed = consumed
        self._owes_since = self._clock()
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
        owed = self._owes
        self.entry.feed(self.sent, journal.readable_ids(self.sent))
        self.sent = journal.readable
        if journal.complete:
            self.entry.end()
            self._ended = True
        if not owed:
            self._owes_since = self._clock()

    @property
    def _owes(self) -> bool:
        """Whether it has ids that it can't be holding back."""
        return self._ended or self.sent - self._consumed > self._held_ids

    def due_s(self, silence_s: float) -> float:
        """Return in how many seconds at the earliest it is to be given up."""
        return self._owes_since + silence_s - self._clock() if self._owes else silence_s

    def give_up(self) -> None:
        """Give up its entry because nothing comes, which is held against the detokenizer."""
        if self.entry is not None:
            self.entry.blame()
            self.entry.cancel()

    def free(self) -> None:
        """Give up its entry; idempotent."""
        if self.entry is not None:
            self.entry.cancel()
