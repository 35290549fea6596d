"""What a replica probably holds, guessed from this router's own routing.

Stands in while a replica's feed is not trusted. Knows keys and instants that the
caller gives; owns no clock. Guesses expire, and there are boundedly many.
"""

from collections import OrderedDict
from collections.abc import Sequence

from router.tree.search import leading

TTL_S = 300.0
LIMIT = 1 << 15


class Predicted:
    """Keys with the instant until which they are believed."""

    def __init__(self, *, ttl_s: float = TTL_S, limit: int = LIMIT) -> None:
        self._ttl_s = ttl_s
        self._limit = limit
        self._until: OrderedDict[int, float] = (
            OrderedDict()
        )  # stalest first, children before their parents

    def __len__(self) -> int:
        return len(self._until)

    def learn(self, keys: Sequence[int], now: float) -> None:
        """A prompt with these keys was sent there."""
        until = self._until
        for key in reversed(keys):
            until[key] = now + self._ttl_s
            until.move_to_end(key)
        while len(until) > self._limit:
            until.popitem(last=False)

    def depth(self, keys: Sequence[int], now: float) -> int:
        """Return how many leading keys are believed to be there."""
        until = self._until
        return leading(keys, 0, lambda key: until.get(key, now) > now)

    def clear(self) -> None:
        """Believe nothing any more."""
        self._until.clear()
