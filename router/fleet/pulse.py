"""When a replica last showed that it works. Pure: instants come as `now`.

That a link is up shows that the group's front lives, not that the ranks behind it do:
a front repeats its last load report every second. What only a rank's step brings is a
sign of life: ids, a start, a load that differs from the one before.
"""

from dataclasses import replace

from router.fleet.workload import Report


class Pulse:
    """Of one replica."""

    def __init__(self) -> None:
        self._last = 0.0
        self._report: Report | None = None
        self._excused = False

    def begin(self, now: float) -> None:
        """A life begins."""
        self._last = now
        self._report = None
        self._excused = False

    def excuse(self, excused: bool, now: float) -> None:
        """Whether its group says that it rests: paused, changing weights, watched by the front."""
        self._excused = excused
        self._last = now

    def beat(self, now: float) -> None:
        """A step of it was heard of."""
        self._last = now

    def hear(self, report: Report, now: float) -> None:
        """Its load came: a sign of life when it is another one than before."""
        said = replace(report, seen_entry_id=0)
        if said != self._report:
            self._report = said
            self._last = now

    def silent_s(self, since: float, now: float) -> float:
        """Return for how many seconds, at most since `since`, nothing has come; 0 while excused."""
        return 0.0 if self._excused else max(0.0, now - max(self._last, since))
