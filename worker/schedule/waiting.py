"""Requests that wait for a place. One that was retracted goes before later arrivals. Pure."""

from worker.schedule.ordered import Ordered
from worker.schedule.sequence import Sequence


class WaitingQueue(Ordered):
    """The queue, and how many ids it will have to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.uncached_tokens = 0

    def push(self, sequence: Sequence) -> None:
        """Queue it at its place."""
        super().push(sequence)
        self.uncached_tokens += sequence.uncached

    def remove(self, sequence: Sequence) -> None:
        """Take it out; `uncached` is what it was when it was queued."""
        super().remove(sequence)
        self.uncached_tokens -= sequence.uncached
