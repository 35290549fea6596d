"""Which replica gets a request that names none. Pure: numbers in, a choice out."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that takes requests.

    Attributes:
        dp_rank: Which one.
        uncached_tokens: Prompt ids still to be computed there, those of dispatches that its
            last load report does not know of included.
        requests: Running, waiting and dispatched ones, counted likewise.
    """

    dp_rank: int
    uncached_tokens: int
    requests: int


class Dispatcher:
    """Least work first; among equals each in its turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Return the dp_rank of one of the candidates.

        Raises:
            ValueError: There is none.
        """
        if not candidates:
            raise ValueError("no candidate")
        least = min((each.uncached_tokens, each.requests) for each in candidates)
        equals = sorted(
            each.dp_rank for each in candidates if (each.uncached_tokens, each.requests) == least
        )
        after = [dp_rank for dp_rank in equals if dp_rank > self._last]
        self._last = after[0] if after else equals[0]
        return self._last
