"""What one output has been given so far; the only truth for a resume.

Knows ids, log probabilities, text and who may add to them. Pure: no clock, no
link, no event loop. Two independent sources feed it and either may die and be
replaced: an *attempt* at a worker adds ids, a *reader* at a detokenizer adds
text. Both are numbered; only the current number of each is heard.

A stop id that ended the output counts and gives no text: it is never sent to a
detokenizer.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from radixmesh.blocks import ID_BYTES, unpack_ids
from radixmesh.errors import InternalError, TokenizerMismatch
from router.request import FinishReason, TokenLogprob


class Verdict(enum.Enum):
    """What became of ids that came from a worker."""

    TAKEN = enum.auto()
    DROPPED = enum.auto()
    # The current attempt skipped a position, or sent what can't be: no more of it can be used.
    GAP = enum.auto()


class Ending(enum.Enum):
    """How an output ended; set once."""

    FINISHED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a detokenizer's answer adds: text, the ids it covers, their log probabilities."""

    text: str
    ids: bytes = b""
    logprobs: tuple[TokenLogprob, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything to deliver."""
        return bool(self.text or self.ids)


class Journal:
    """Ids and text of one output.

    Args:
        limit: Output ids at which the output ends with LENGTH; at least 1.
        stop_ids: Ids that end the output once it has `min_tokens` ids.
        min_tokens: No end of any kind before so many ids.
        logprobs: Whether log probabilities are kept and released with the text.
        vocab_size: Ids are below it; 0 when not known.
    """

    def __init__(
        self,
        *,
        limit: int,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        logprobs: bool = False,
        vocab_size: int = 0,
    ) -> None:
        self._limit = limit
        self._stop_ids = frozenset(stop_ids)
        self._min_tokens = min_tokens
        self._wants_logprobs = logprobs
        self._vocab_size = vocab_size
        self._ids = bytearray()
        self._logprobs: list[float] = []
        self._attempt = 0
        self._reader = 0
        # Text that went to the client (or waits for it), and how many ids it covers.
        self._text: list[str] = []
        self._released = 0
        # The present reader: how far its text repeats what is known, and the ids it consumed.
        self._repeat = ""
        self._consumed = 0
        self._worker_finish: FinishReason | None = None
        self._stop_matched = ""
        self._completed = 0
        self._ending: Ending | None = None

    def __repr__(self) -> str:
        state = self._ending.name if self._ending else "open"
        return (
            f"<Journal {self.position} ids, {self._released} released, "
            f"attempt {self._attempt}, reader {self._reader}, {state}>"
        )

    @property
    def position(self) -> int:
        """The position of the next id, which is the number of ids so far."""
        return len(self._ids) // ID_BYTES

    @property
    def ids(self) -> bytes:
        """All ids so far; a new attempt gets them as its `output_ids`."""
        return bytes(self._ids)

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._text)

    @property
    def complete(self) -> bool:
        """Whether no further id can come: a worker ended it, or a stop string did."""
        return self._worker_finish is not None or self._ending is not None

    @property
    def ending(self) -> Ending | None:
        """How it ended, or None."""
        return self._ending

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the output ended; a stop string beats what the worker said."""
        return FinishReason.STOP_STRING if self._stop_matched else self._worker_finish

    @property
    def stop_matched(self) -> str:
        """The stop string that ended the text; empty when none did."""
        return self._stop_matched

    @property
    def completion_tokens(self) -> int:
        """Ids that count: a final stop id included, ids after a stop string excluded."""
        return self._completed if self._ending is Ending.FINISHED else self.position

    # The worker's side

    def begin_attempt(self) -> int:
        """Return the number of a new attempt; earlier ones are not heard any more."""
        self._attempt += 1
        return self._attempt

    def fence(self) -> None:
        """Hear no attempt until the next one begins."""
        self._attempt += 1

    def take_ids(
        self,
        attempt: int,
        position: int,
        ids: bytes,
        logprobs: Sequence[float] = (),
        finish: int = 0,
    ) -> Verdict:
        """Append ids of the current attempt that stand at exactly the next position.

        Args:
            attempt: Number from `begin_attempt`.
            position: Output position of the first of `ids`.
            ids: Little-endian uint32.
            logprobs: One per id, or empty.
            finish: 0, or why the worker ended the output with the last of these ids.
        """
        if attempt != self._attempt or self.complete or position < self.position:
            return Verdict.DROPPED
        if position > self.position or not self._can_be(ids, finish):
            return Verdict.GAP
        self._ids += ids
        if self._wants_logprobs:
            count = len(ids) // ID_BYTES
            self._logprobs.extend(logprobs if len(logprobs) == count else [float("nan")] * count)
        self._worker_finish = _reason(finish) if finish else self._own_finish(ids)
        return Verdict.TAKEN

    def _can_be(self, ids: bytes, finish: int) -> bool:
        """Whether a worker that is right may send this at the next position."""
        if len(ids) % ID_BYTES or self.position + len(ids) // ID_BYTES > self._limit:
            return False
        if not ids:
            # A stop id comes with the word that it is one.
            return finish != FinishReason.STOP_TOKEN
        return not self._vocab_size or max(unpack_ids(ids)) < self._vocab_size

    def _own_finish(self, ids: bytes) -> FinishReason | None:
        # A worker that died after its last id may not have said so.
        if not ids or self.position < self._min_tokens:
            return None
        last = int.from_bytes(ids[-ID_BYTES:], "little")
        if last in self._stop_ids:
            return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if self.position >= self._limit else None

    # The detokenizer's side

    @property
    def readable(self) -> int:
        """How many ids a detokenizer may see: all but a final stop id."""
        stopped = self._worker_finish is FinishReason.STOP_TOKEN
        return self.position - 1 if stopped else self.position

    def readable_ids(self, start: int) -> bytes:
        """Return the ids from `start` on that a detokenizer may see."""
        return bytes(self._ids[start * ID_BYTES : self.readable * ID_BYTES])

    def begin_reader(self) -> int:
        """Return the number of a new reader, which must be sent all ids from position 0 on."""
        self._reader += 1
        self._repeat = self.text
        self._consumed = 0
        return self._reader

    def take_text(
        self, reader: int, text: str, consumed: int, token_bytes: Sequence[bytes] = ()
    ) -> Fresh:
        """Take certain text; return the part that is new.

        Args:
            reader: Number from `begin_reader`; others are not heard.
            text: To append to what this reader said before.
            consumed: Ids from position 0 on that are covered by all its text so far.
            token_bytes: For log probabilities, the bytes of each id newly covered.

        Raises:
            TokenizerMismatch: A replay gave other text than before.
            InternalError: It counts ids that it was not sent.
        """
        if reader != self._reader or self._ending is not None:
            return Fresh("")
        if not self._consumed <= consumed <= self.readable:
            raise InternalError(
                "a detokenizer counts ids that it was not sent",
                consumed=consumed,
                readable=self.readable,
            )
        fresh = Fresh(self._unheard(text), *self._release(consumed, token_bytes))
        self._consumed = consumed
        if fresh.text:
            self._text.append(fresh.text)
        return fresh

    def _unheard(self, text: str) -> str:
        if not self._repeat:
            return text
        size = min(len(text), len(self._repeat))
        if text[:size] != self._repeat[:size]:
            raise TokenizerMismatch("a detokenizer replayed other text than the one before it")
        self._repeat = self._repeat[size:]
        return text[size:]

    def _release(
        self, consumed: int, token_bytes: Sequence[bytes]
    ) -> tuple[bytes, tuple[TokenLogprob, ...]]:
        start = self._released
        if consumed <= start:
            return b"", ()
        self._released = consumed
        ids = bytes(self._ids[start * ID_BYTES : consumed * ID_BYTES])
        # `token_bytes` begins at what this reader had consumed, which may be behind `start`.
        return ids, self._logprobs_of(start, ids, token_bytes[start - self._consumed :])

    def _logprobs_of(
        self, start: int, ids: bytes, token_bytes: Sequence[bytes]
    ) -> tuple[TokenLogprob, ...]:
        if not self._wants_logprobs:
            return ()
        numbers = unpack_ids(ids)
        raws = [*token_bytes, *[b""] * (len(numbers) - len(token_bytes))]
        values = self._logprobs[start : start + len(numbers)]
        return tuple(map(TokenLogprob, numbers, raws, values))

    def finish(
        self,
        reader: int,
        tail: str,
        consumed: int,
        *,
        stop_matched: str = "",
        token_bytes: Sequence[bytes] = (),
    ) -> Fresh | None:
        """End the output by the detokenizer's last word; return what is new, or None if ended.

        Raises:
            TokenizerMismatch: A replay gave other text than before.
            InternalError: The detokenizer is done and the output is not.
        """
        if reader != self._reader or self._ending is not None:
            return None
        if not stop_matched and (self._worker_finish is None or consumed != self.readable):
            raise InternalError("a detokenizer was done too early", consumed=consumed)
        fresh = self.take_text(reader, tail, consumed, token_bytes)
        self._stop_matched = stop_matched
        self._completed = consumed
        if not stop_matched and self._worker_finish is FinishReason.STOP_TOKEN:
            self._completed = self.position
            fresh = self._with_stop_id(fresh)
        self._ending = Ending.FINISHED
        return fresh

    def _with_stop_id(self, fresh: Fresh) -> Fresh:
        ids = bytes(self._ids[-ID_BYTES:])
        logprobs = self._logprobs_of(self.position - 1, ids, ())
        self._released = self.position
        return Fresh(fresh.text, fresh.ids + ids, fresh.logprobs + logprobs)

    def end(self, ending: Ending) -> bool:
        """Set the terminal state; return whether this call did."""
        if self._ending is not None:
            return False
        self._ending = ending
        return True


def _reason(finish: int) -> FinishReason:
    # A reason from the future ends the output too; only a stop id is treated apart.
    stopped = finish == FinishReason.STOP_TOKEN
    return FinishReason.STOP_TOKEN if stopped else FinishReason.LENGTH
