"""Ids become text as soon as it is certain. Pure: knows tables of pieces; loads no tokenizer.

For any ids in any chunking the joined text equals the offline decode of all of
them, in time linear in their number. `tokenizers.DecodeStream` is not used: it
waits for as long as its text ends in U+FFFD and decodes its whole window again
with every id, so invalid bytes and ids without text take quadratic time.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"


class Span(NamedTuple):
    """A stretch of certain text and where it came from.

    Attributes:
        text: Never empty.
        before: Output ids, from the first one on, whose text is all before this span.
        through: Output ids up to and including the one that completed this span.
    """

    text: str
    before: int
    through: int


class TextStream(Protocol):
    """The text of one output. `settled`: ids from the first one on whose text is all out."""

    settled: int

    def feed(self, ids: Iterable[int]) -> list[Span]:
        """Take the next ids, return the text that became certain."""
        ...

    def finish(self) -> list[Span]:
        """Return what was held back; no ids follow."""
        ...


class ByteStream:
    """Text of a byte-level vocabulary: the bytes of all ids, read as UTF-8.

    Bytes that are not UTF-8 become U+FFFD once per maximal invalid part, as in the
    offline decode.
    """

    def __init__(self, raw: Callable[[int], bytes]) -> None:
        self._raw = raw
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._seen = 0
        self.settled = 0

    def feed(self, ids: Iterable[int]) -> list[Span]:
        """Take the next ids, return the text that became certain."""
        spans = []
        decode, state = self._utf8.decode, self._utf8.getstate
        for token_id in ids:
            self._seen += 1
            text = decode(self._raw(token_id))
            if text:
                spans.append(Span(text, self.settled, self._seen))
            if not state()[0]:
                self.settled = self._seen
            elif text:  # what is open began in this very id
                self.settled = self._seen - 1
        return spans

    def finish(self) -> list[Span]:
        """Return what was held back: an unfinished character, as U+FFFD."""
        text = self._utf8.decode(b"", final=True)
        spans = [Span(text, self.settled, self._seen)] if text else []
        self.settled = self._seen
        return spans


class Piece(NamedTuple):
    """What one id is worth: text at the start of an output, text after others, or one byte."""

    first: str
    rest: str
    byte: int | None = None


class PieceStream:
    """Text of a vocabulary of whole pieces, some of which may be single bytes.

    A run of byte ids is text only if the whole run is UTF-8; otherwise each of its
    bytes is one U+FFFD. So a run that is valid so far waits for its end, and an
    invalid one doesn't wait any more.

    Args:
        piece: What an id is worth; None when it is left out altogether.
        lead: A character of which the first `lead_count` at the start of the whole
            text are left out.
    """

    def __init__(
        self, piece: Callable[[int], Piece | None], *, lead: str = "", lead_count: int = 0
    ) -> None:
        self._piece = piece
        self._lead = lead
        self._lead_count = lead_count
        self._seen = 0
        self._begun = False
        self._run = _ByteRun()
        self.settled = 0

    def feed(self, ids: Iterable[int]) -> list[Span]:
        """Take the next ids, return the text that became certain."""
        spans: list[Span] = []
        for token_id in ids:
            self._seen += 1
            piece = self._piece(token_id)
            if piece is not None:
                self._take(piece, spans)
            self.settled = self._run.settled if self._run.waiting else self._seen
        return self._trim(spans)

    def finish(self) -> list[Span]:
        """Return what was held back: a run of bytes."""
        spans = self._trim(self._run.close())
        self.settled = self._seen
        return spans

    def _take(self, piece: Piece, spans: list[Span]) -> None:
        if piece.byte is not None:
            spans += self._run.add(piece.byte, self._seen)
        else:
            spans += self._run.close()
            text = piece.rest if self._begun else piece.first
            if text:
                spans.append(Span(text, self._seen - 1, self._seen))
        self._begun = True

    def _trim(self, spans: list[Span]) -> list[Span]:
        """Leave out the lead at the start of the whole text."""
        while self._lead_count and spans:
            text, before, through = spans.pop(0)
            kept = text.lstrip(self._lead)
            dropped = min(len(text) - len(kept), self._lead_count)
            # Anything but the lead ends the start of the text.
            self._lead_count = 0 if kept else self._lead_count - dropped
            if len(text) > dropped:
                spans.insert(0, Span(text[dropped:], before, through))
        return spans


class _ByteRun:
    """Consecutive byte ids. `settled`: ids whose text is out while the run waits."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._broken = False
        self._raw = bytearray()
        self._places: list[int] = []  # per waiting byte: ids up to and including its own
        self.settled = 0

    @property
    def waiting(self) -> bool:
        """Whether bytes are held back."""
        return bool(self._places)

    def add(self, byte: int, place: int) -> list[Span]:
        """Take the next byte; returns text only once the run is known to be invalid."""
        if not self._places:
            self.settled = place - 1
        self._raw.append(byte)
        self._places.append(place)
        if not self._broken:
            try:
                self._utf8.decode(bytes((byte,)))
            except UnicodeDecodeError:
                self._broken = True
        return self._give_up() if self._broken else []

    def close(self) -> list[Span]:
        """End the run and return its text."""
        complete = not self._utf8.getstate()[0]
        spans = self._whole() if complete and not self._broken else self._give_up()
        self._utf8.reset()
        self._broken = False
        return spans

    def _whole(self) -> list[Span]:
        spans = []
        start = 0
        for char in self._raw.decode():
            end = start + len(char.encode())
            spans.append(Span(char, self._places[start] - 1, self._places[end - 1]))
            start = end
        self._clear()
        return spans

    def _give_up(self) -> list[Span]:
        spans = [Span(REPLACEMENT, place - 1, place) for place in self._places]
        self._clear()
        return spans

    def _clear(self) -> None:
        self._raw.clear()
        self._places.clear()


class HeldStream:
    """Text of a vocabulary whose decoder can't work piece by piece: all of it at the end."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self.settled = 0

    def feed(self, ids: Iterable[int]) -> list[Span]:
        """Keep the ids; nothing is certain."""
        self._ids.extend(ids)
        return []

    def finish(self) -> list[Span]:
        """Return the whole text."""
        self.settled = len(self._ids)
        text = self._decode(self._ids)
        return [Span(text, 0, self.settled)] if text else []
