"""Which runs the index can best do without. Knows runs, their use and their order; drops nothing.

A hand goes round all runs and compares a few of those below which nothing hangs at a time.
The worth of a run is when it was last of use, and each time that it was asked for lets it
stay one turnover of the index longer, up to a limit. So a prefix that is asked for often
outlives a younger one that nobody asked for, and is forgotten some turnovers after the
last one did.
"""

from router.tree.runs import Runs

WINDOW = 64  # runs that are compared with one another
_TAKEN = 16  # of these, so many may go before others are looked at


class Hand:
    """Where the search for what can go stands."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._at = 0

    def worth(self, number: int, turnover: int) -> int:
        """Return what a run is worth; the less, the sooner it goes.

        Args:
            number: The run.
            turnover: Ticks in which the whole index is replaced.
        """
        return self._runs.used[number] + self._runs.hits[number] * turnover

    def least(self) -> list[tuple[int, int, int]]:
        """Return a few runs without anything below them, the one of least worth first.

        Returns:
            For each run its worth, its number, and the turnover by which it was judged.
        """
        runs, turnover = self._runs, max(1, self._runs.count)
        found: list[tuple[int, int, int]] = []
        for _ in range(len(runs.masks)):
            self._at = (self._at or len(runs.masks)) - 1
            self._at = min(self._at, len(runs.masks) - 1)
            if runs.keys[self._at] and not runs.children[self._at]:
                found.append((self.worth(self._at, turnover), self._at, turnover))
                if len(found) == WINDOW:
                    break
        found.sort()
        return found[:_TAKEN] if len(found) == WINDOW else found
