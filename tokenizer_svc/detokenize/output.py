"""One output: ids in order become text up to its end or a stop. Pure: knows no wire, no clock.

Everything follows from the ids alone, so another process that is given the same
ids from position 0 on says the same.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from radixmesh.errors import InvalidRequest, UnknownToken
from tokenizer_svc.detokenize.stops import StopMatcher, check_stops
from tokenizer_svc.incremental import Span
from tokenizer_svc.pieces import Pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How an output is turned into text; the fields of DecodeOptions."""

    stops: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    keep_special: bool = False
    render: bool = False


class Progress(NamedTuple):
    """What one step of an output says.

    Attributes:
        text: To append.
        consumed: Ids, from position 0 on, that all text so far covers.
        fresh: How many of them are new.
        rendered: With `render`, the bytes of each id that is newly covered.
        stop: The stop string that ended the text; empty while none has.
    """

    text: str
    consumed: int
    fresh: int
    rendered: list[bytes]
    stop: str = ""


class Output:
    """The text of one output so far.

    Raises:
        InvalidRequest: The stops are too many, too long or empty.
    """

    def __init__(self, pieces: Pieces, options: OutputOptions) -> None:
        check_stops(options.stops)
        self._pieces = pieces
        self._options = options
        self._stream = pieces.open(keep_special=options.keep_special)
        self._stops = (
            StopMatcher(options.stops, include=options.include_stop, min_ids=options.min_tokens)
            if options.stops
            else None
        )
        self._held: deque[tuple[int, Span]] = deque()  # spans not all out: where each ends
        self._length = 0  # characters of text, held ones included
        self._position = 0
        self._consumed = 0
        self._unrendered: deque[int] = deque()
        self._begun = False

    def __repr__(self) -> str:
        held = sum(len(span.text) for _, span in self._held)
        return f"Output(ids={self._position}, consumed={self._consumed}, held={held})"

    def feed(self, position: int, ids: Sequence[int]) -> Progress:
        """Take the next ids.

        Args:
            position: Output position of the first of them.
            ids: In order.

        Raises:
            InvalidRequest: The position is not the next one.
            UnknownToken: An id is outside the vocabulary.
        """
        if position != self._position:
            raise InvalidRequest(
                f"ids begin at position {position}, expected {self._position}", field="positions"
            )
        if ids and max(ids) >= self._pieces.size:
            raise UnknownToken(
                f"token id {max(ids)} is outside the vocabulary",
                field="token_ids",
                vocab_size=self._pieces.size,
            )
        self._position += len(ids)
        if self._options.render:
            self._unrendered.extend(ids)
        return self._advance(self._stream.feed(ids), last=False)

    def finish(self) -> Progress:
        """Return what was held back; no ids follow."""
        return self._advance(self._stream.finish(), last=True)

    def _advance(self, spans: Iterable[Span], *, last: bool) -> Progress:
        if self._stops is None:
            text = "".join([span.text for span in spans])
            return self._progress(text, self._stream.settled)
        text = "".join([self._match(self._stops, span) for span in spans])
        if last:
            text += self._stops.finish()
        match = self._stops.match
        if match:
            return self._progress(text, match.ids, match.stop)
        return self._progress(text, self._covered(self._stops.passed))

    def _match(self, stops: StopMatcher, span: Span) -> str:
        self._length += len(span.text)
        self._held.append((self._length, span))
        return stops.feed(span.text, span.through)

    def _covered(self, passed: int) -> int:
        """Ids whose text is all among the first `passed` characters."""
        while self._held and self._held[0][0] <= passed:
            self._held.popleft()
        if not self._held:
            return self._stream.settled
        end, span = self._held[0]
        # Inside a span all is out but the rest of its last id.
        return span.before if passed <= end - len(span.text) else span.through - 1

    def _progress(self, text: str, consumed: int, stop: str = "") -> Progress:
        fresh = consumed - self._consumed
        self._consumed = consumed
        rendered = self._render(fresh) if self._options.render else []
        return Progress(text, consumed, fresh, rendered, stop)

    def _render(self, count: int) -> list[bytes]:
        rendered = []
        for _ in range(count):
            raw = self._pieces.render(
                self._unrendered.popleft(),
                keep_special=self._options.keep_special,
                first=not self._begun,
            )
            self._begun = self._begun or bool(raw)
            rendered.append(raw)
        return rendered
