"""Compares the ranks' marks with rank (0, 0)'s own: all ranks plan alike, or the replica ends.

Ranks of the own stage are compared before a step is launched. Those of later stages are
still busy with earlier steps then; they are compared before the step's result is awaited.
All results before it are there, so those stages have nothing else to do: their marks come
within the time of a peer, however long a step takes.
"""

import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from radixmesh.errors import RankDesync
from worker.group.carrier import PeerLost, Root
from worker.group.plans import Plans
from worker.group.topology import Topology

logger = logging.getLogger(__name__)

# For a mark that is here if it ever comes.
_HERE_S: Final = 0.05


class Comparison:
    """What rank (0, 0) expects of the marks that are still to come."""

    def __init__(self, root: Root, plans: Plans, shape: Topology) -> None:
        self._root = root
        self._plans = plans
        self._stage = range(1, shape.tp)
        self._later = range(shape.tp, shape.replica_size)
        self._lag = shape.pp - 1
        self._open: deque[int] = deque()  # steps that later stages were not compared for
        # For each rank (step, own mark) of the marks not read yet, in their order.
        self._expected: list[deque[tuple[int, int]]] = [deque() for _ in range(shape.replica_size)]

    def before_launch(self, step: int, own: int) -> None:
        """Compare the marks of this stage's ranks for a step.

        Raises:
            RankDesync: One planned something else.
            PeerLost: One is gone, or gave none in time.
        """
        for expected in self._expected[1:]:
            expected.append((step, own))
        self._compare(self._stage)
        if self._later:
            self._open.append(step)

    def before_commit(self, step: int) -> None:
        """Compare the marks of later stages for all steps up to this one. Raises as above."""
        while self._open and self._open[0] <= step:
            self._open.popleft()
            self._compare(self._later)

    def after_turn(self, *, idle: bool) -> None:
        """Compare what must not wait longer: all before a rest, else what lags too far."""
        while self._open and (idle or len(self._open) > self._lag):
            self._open.popleft()
            self._compare(self._later)

    def now(self, step: int, own: int) -> None:
        """Compare a mark that all ranks give when nothing is under way. Raises as above."""
        self.before_launch(step, own)
        self.after_turn(idle=True)

    def explain(self) -> None:
        """Read the marks that are there already, after a rank was lost.

        Raises:
            RankDesync: One shows that its rank planned something else.
        """
        for rank, expected in enumerate(self._expected):
            with suppress(PeerLost):
                while expected:
                    self._compare([rank], timeout_s=_HERE_S)

    def _compare(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> None:
        different: list[int] = []
        step = 0
        for rank in ranks:
            # One at a time: a mark that was read before another rank proves lost is done with,
            # so that `explain` takes the next one for what it is.
            try:
                [mark] = self._root.marks([rank], timeout_s)
            except PeerLost:
                if different:
                    break
                raise
            step, own = self._expected[rank].popleft()
            if mark != own:
                different.append(rank)
        if different:
            extra = {"ranks": different, "at": step, "plans": str(self._plans)}
            logger.error("plans differ", extra=extra)
            raise RankDesync(f"ranks {different} planned another step {step}")
