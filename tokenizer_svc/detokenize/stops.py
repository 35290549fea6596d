"""Stop strings in a stream of text. Pure: knows characters; knows no ids beyond their count.

The match is the one that begins first; of several that begin at one place, the
longest. It does not depend on how the text is cut. What is held back is exactly
the longest suffix that may still become a stop. Each stop is followed by a
Knuth-Morris-Pratt automaton that runs only while it is inside a prefix, so time
is linear in the text and memory is two bytes a character.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from radixmesh.errors import InvalidRequest

STOP_LIMIT = 64
STOP_BYTES_LIMIT = 4096


class Match(NamedTuple):
    """A stop that was found: which, where it begins and ends, how many ids completed it."""

    stop: str
    start: int
    end: int
    ids: int


def check_stops(stops: Sequence[str]) -> None:
    """Refuse stops that are too many, too long or empty.

    Raises:
        InvalidRequest: With the limit in its metadata.
    """
    if len(stops) > STOP_LIMIT:
        raise InvalidRequest(
            f"{len(stops)} stop strings are more than {STOP_LIMIT}", field="stop", limit=STOP_LIMIT
        )
    if not all(stops):
        raise InvalidRequest("a stop string must not be empty", field="stop")
    if any(len(stop.encode(errors="replace")) > STOP_BYTES_LIMIT for stop in stops):
        raise InvalidRequest(
            f"a stop string is longer than {STOP_BYTES_LIMIT} bytes",
            field="stop",
            limit=STOP_BYTES_LIMIT,
        )


class StopMatcher:
    """Finds the first stop in one text.

    Args:
        stops: What ends the text; see `check_stops`.
        include: The text that passes ends with the stop instead of before it.
        min_ids: Stops that fewer ids complete are no matches and pass.

    Attributes:
        match: The stop that was found, once it is certain. Nothing passes after it.
        passed: Characters that passed so far.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False, min_ids: int = 0) -> None:
        self._include = include
        self._min_ids = min_ids
        self._by_first: dict[str, list[_Automaton]] = {}
        for stop in dict.fromkeys(stops):
            self._by_first.setdefault(stop[0], []).append(_Automaton(stop))
        self._inside: list[_Automaton] = []
        self._held = ""
        self._read = 0
        self._best: Match | None = None
        self.match: Match | None = None
        self.passed = 0

    def feed(self, text: str, ids: int) -> str:
        """Take more text; return what passes.

        Args:
            text: The next characters.
            ids: Ids up to and including the one that completed them. Never falls.
        """
        if self.match:
            return ""
        self._held += text
        for char in text:
            if self._inside or char in self._by_first:
                self._step(char, ids)
                if self.match:
                    return self._end()
            self._read += 1
        return self._pass(self._certain())

    def finish(self) -> str:
        """The text is over: return what of the held rest passes, and settle the match."""
        if self.match:
            return ""
        self.match = self._best
        return self._end() if self.match else self._pass(self._read)

    def _step(self, char: str, ids: int) -> None:
        """Read one character: move the automata on, then see whether the best match is final."""
        inside = [automaton for automaton in self._inside if automaton.step(char)]
        for automaton in self._by_first.get(char, ()):
            if automaton.depth == 0:
                automaton.step(char)
                inside.append(automaton)
        end = self._read + 1
        for automaton in inside:
            if automaton.complete and ids >= self._min_ids:
                self._consider(Match(automaton.stop, end - automaton.depth, end, ids))
        self._inside = [automaton for automaton in inside if automaton.settle()]
        longest = max((automaton.depth for automaton in self._inside), default=0)
        if self._best and end - longest > self._best.start:
            self.match = self._best

    def _consider(self, found: Match) -> None:
        best = self._best
        if best is None or (found.start, -found.end) < (best.start, -best.end):
            self._best = found

    def _certain(self) -> int:
        """Where the text begins that may still be part of a stop."""
        longest = max((automaton.depth for automaton in self._inside), default=0)
        certain = self._read - longest
        return min(certain, self._best.start) if self._best else certain

    def _end(self) -> str:
        match = self.match
        if match is None:
            return ""
        text = self._pass(match.end if self._include else match.start)
        self._held = ""
        return text

    def _pass(self, until: int) -> str:
        count = until - self.passed
        text, self._held = self._held[:count], self._held[count:]
        self.passed = until
        return text


class _Automaton:
    """How much of one stop the text ends with. `depth`: characters."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.depth = 0
        self._borders = _borders(stop)

    @property
    def complete(self) -> bool:
        """Whether the text ends with the whole stop."""
        return self.depth == len(self.stop)

    def step(self, char: str) -> int:
        """Read one character; return the new depth."""
        while self.depth and self.stop[self.depth] != char:
            self.depth = self._borders[self.depth]
        if self.stop[self.depth] == char:
            self.depth += 1
        return self.depth

    def settle(self) -> int:
        """Leave a complete stop for its longest border, which may go on; return the depth."""
        if self.complete:
            self.depth = self._borders[self.depth]
        return self.depth


def _borders(stop: str) -> "array[int]":
    """For each length, the longest proper prefix of it that is also its suffix, in characters."""
    borders = array("H", bytes(2 * (len(stop) + 1)))
    depth = 0
    for place in range(1, len(stop)):
        while depth and stop[place] != stop[depth]:
            depth = borders[depth]
        if stop[place] == stop[depth]:
            depth += 1
        borders[place + 1] = depth
    return borders
