"""Binary search for the longest leading run of keys. Knows nothing but an order and a question."""

from collections.abc import Callable, Sequence


def leading(keys: Sequence[int], known: int, has: Callable[[int], bool]) -> int:
    """Return how many leading keys are had, given that the first `known` are.

    Right when a had key implies that all keys before it are had.
    """
    low, high = known, len(keys)
    while low < high:
        middle = (low + high) // 2
        if has(keys[middle]):
            low = middle + 1
        else:
            high = middle
    return low
