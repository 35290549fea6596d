"""Waits that grow with every failure, by tenacity's arithmetic. Pure: waits for nothing itself."""

import random

import tenacity


class Growing:
    """Seconds that double up to a limit.

    Args:
        first_s: The first wait.
        most_s: The longest.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._wait = tenacity.wait_exponential(multiplier=first_s, max=max(first_s, most_s))

    def seconds(self, failures: int) -> float:
        """Return the wait after so many failures in a row; none after none."""
        if failures < 1:
            return 0.0
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = failures
        return float(self._wait(state))


class Backoff:
    """Waits between tries: a random part of a window that grows, until `reset`.

    Args:
        first_s: The first window.
        most_s: The widest.
        rng: Draws the part.
    """

    def __init__(self, first_s: float, most_s: float, rng: random.Random) -> None:
        self._windows = Growing(first_s, most_s)
        self._rng = rng
        self._failures = 0

    def next_s(self) -> float:
        """Return the next wait in seconds."""
        self._failures += 1
        return self._rng.uniform(0, self._windows.seconds(self._failures))

    def reset(self) -> None:
        """Start over: the last try was good."""
        self._failures = 0
