"""Which replica gets a request that names none. Pure: numbers in, a choice out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final


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


# What is least where a request should go; candidates that are equal in it take turns.
Burden = Callable[[Candidate], tuple[int, ...]]

BURDENS: Final[Mapping[str, Burden]] = {
    "tokens": lambda each: (each.uncached_tokens, each.requests),
    "shortest_queue": lambda each: (each.requests,),
    "round_robin": lambda _: (),
}


class Dispatcher:
    """Least burden first; among equals each in its turn."""

    def __init__(self, policy: str = "tokens") -> None:
        """Take a policy by its name in `BURDENS`. Raises KeyError."""
        self._burden = BURDENS[policy]
        self._last = -1

    def choose(self, candidates: Sequence[Candidate]) -> int:
        """Return the dp_rank of one of the candidates.

        Raises:
            ValueError: There is none.
        """
        if not candidates:
            raise ValueError("no candidate")
        burdens = [self._burden(each) for each in candidates]
        least = min(burdens)
        equals = sorted(
            each.dp_rank
            for each, burden in zip(candidates, burdens, strict=True)
            if burden == least
        )
        after = [dp_rank for dp_rank in equals if dp_rank > self._last]
        self._last = after[0] if after else equals[0]
        return self._last
