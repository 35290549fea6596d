"""The last plans of a rank, for the log of its end."""

from collections import deque

from worker.engine.engine import StepPlan


class Plans:
    """The last plans of a rank with the digest after each."""

    def __init__(self, kept: int) -> None:
        self._last: deque[tuple[StepPlan, int]] = deque(maxlen=kept)

    def __str__(self) -> str:
        """Oldest first: step, digest, and (request, start, ids) of each row."""
        # Copied in one go: the watchdog's thread may ask while the rank's own thread adds.
        return "; ".join(
            f"{plan.step} {digest:016x} {[(r.request_id, r.start, len(r.ids)) for r in plan.rows]}"
            for plan, digest in tuple(self._last)
        )

    def add(self, plan: StepPlan, digest: int) -> None:
        """Keep a plan; the oldest is forgotten."""
        self._last.append((plan, digest))
