"""Places that are held for a time, and the bounded line of those who wait for some.

Knows units and order; nothing of what they are counted for. One event loop.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from radixmesh.errors import MeshError, QueueFull
from router.edge.line import Line
from router.edge.outflow import Outflow

# What a refused client is told to wait, in seconds.
HINT_BOUNDS_S: Final = (0.1, 60.0)
BANDS: Final = ("high", "normal", "low")


def band_of(priority: int) -> str:
    """Return the name under which a class is counted."""
    return BANDS[(priority <= 0) + (priority < 0)]


@dataclass(slots=True, eq=False)
class _Waiter:
    priority: int
    units: int
    granted: asyncio.Future[None]


class Places:
    """Units, of which at most `limit` are held at once.

    One who asks for more than `limit` gets it when nobody else holds any.

    Args:
        what: For messages.
        limit: Units; 0 means no limit.
        max_waiting: How many may wait; None: any number.
        max_waiting_units: What all who wait may ask for together; 0 means no limit.
    """

    def __init__(
        self, what: str, limit: int, *, max_waiting: int | None, max_waiting_units: int = 0
    ) -> None:
        self._what = what
        self._limit = limit
        self._max_waiting = max_waiting
        self._max_waiting_units = max_waiting_units
        self._held = 0
        self._waiting_units = 0
        self._line: Line[_Waiter] = Line()
        self._bands = dict.fromkeys(BANDS, 0)
        self._outflow = Outflow()

    def __repr__(self) -> str:
        return f"<Places {self._held}/{self._limit} {self._what} held, {self.waiting} wait>"

    @property
    def held(self) -> int:
        """Units that are held."""
        return self._held

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._line)

    @property
    def waiting_units(self) -> int:
        """What they wait for."""
        return self._waiting_units

    @property
    def bands(self) -> Mapping[str, int]:
        """How many wait, by band of class."""
        return self._bands

    async def take(self, units: int, *, priority: int, timeout_s: float) -> None:
        """Hold units until they are given back; waits in line.

        Args:
            units: How many.
            priority: Class in the line.
            timeout_s: The longest wait, in seconds.

        Raises:
            QueueFull: Nobody else may wait; `cause` in its metadata says what is full.
            TimeoutError: The wait was too long.
            MeshError: What the line was ended by.
        """
        if not self._line and self._fits(units):
            self._held += units
            return
        self._check_room(units)
        waiter = _Waiter(priority, units, asyncio.get_running_loop().create_future())
        self._join(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                await waiter.granted
        except BaseException:
            self._give_up(waiter)
            raise

    def give_back(self, units: int) -> None:
        """Hold units no more."""
        self._held -= units
        self._outflow.note(units, _now())
        self._serve()

    def end(self, error: MeshError) -> None:
        """Send all away who wait."""
        for waiter in self._line:
            if not waiter.granted.done():
                waiter.granted.set_exception(error)

    def refusal(self, message: str, cause: str, units: int) -> QueueFull:
        """Return a refusal whose hint says when the present line will have been served."""
        ahead = self._waiting_units + units
        low, high = HINT_BOUNDS_S
        return QueueFull(
            message,
            retry_after_s=min(max(self._outflow.seconds_for(ahead, _now()), low), high),
            cause=cause,
            limit=self._limit,
            queued=self.waiting,
        )

    def _fits(self, units: int) -> bool:
        return not self._limit or not self._held or self._held + units <= self._limit

    def _check_room(self, units: int) -> None:
        what = self._what
        if self._max_waiting is not None and self.waiting >= self._max_waiting:
            raise self.refusal(f"too many wait for {what}", "requests", units)
        bound = self._max_waiting_units
        if bound and self._waiting_units + units > bound:
            raise self.refusal(f"those who wait ask for too many {what}", "tokens", units)

    def _join(self, waiter: _Waiter) -> None:
        if not self._line:
            self._outflow.begin(_now())
        self._line.add(waiter)
        self._count(waiter, 1)
        self._serve()

    def _count(self, waiter: _Waiter, sign: int) -> None:
        self._waiting_units += sign * waiter.units
        self._bands[band_of(waiter.priority)] += sign

    def _serve(self) -> None:
        while (head := self._line.head()) is not None and self._fits(head.units):
            self._line.pop()
            self._count(head, -1)
            if not head.granted.done():
                self._held += head.units
                head.granted.set_result(None)

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter in self._line:
            self._line.remove(waiter)
            self._count(waiter, -1)
            # It may have been the one who did not fit.
            self._serve()
        elif waiter.granted.done() and not _failed(waiter.granted):
            # The units came in the same moment as the cancel or time-out: hand them on.
            self.give_back(waiter.units)


def _failed(granted: asyncio.Future[None]) -> bool:
    return granted.cancelled() or granted.exception() is not None


def _now() -> float:
    return asyncio.get_running_loop().time()
