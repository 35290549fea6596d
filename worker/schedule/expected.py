"""Prefixes that queued requests will bring to the cache: what several share is counted once.

Knows block keys; no request and no cache. Only the report of load looks here, so that a burst
of siblings does not look like as many prefills.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence


class Expected:
    """Block keys, with how many queued requests will bring each."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def depth(self, keys: Sequence[int], held: int) -> int:
        """Return how many leading `keys` are held or expected, given that `held` are held."""
        counts = self._counts
        return bisect_left(
            range(len(keys)), 1, lo=held, key=lambda index: keys[index] not in counts
        )

    def add(self, keys: Sequence[int]) -> None:
        """One more request will bring these."""
        self._counts.update(keys)

    def remove(self, keys: Sequence[int]) -> None:
        """One request less will bring these."""
        counts = self._counts
        for key in keys:
            if counts[key] > 1:
                counts[key] -= 1
            else:
                del counts[key]


def common(keys: Sequence[int], others: Sequence[int], held: int) -> int:
    """Return how many leading keys are equal, at least `held`: keys name whole prefixes."""
    count = min(len(keys), len(others))
    if held >= count or keys[held] != others[held]:
        return held
    return bisect_left(range(count), 1, lo=held, key=lambda index: keys[index] != others[index])
