"""Which replicas answer far later than was predicted, while their siblings do not.

Knows predicted and actual seconds to the first id; no request, no replica, no clock
(instants come as `now`). A replica's own reports say how fast it is and how much waits
there, and the price counts on them: what is left over is a replica whose deeds are not
its words - a host that swaps, a throttled device, a lossy path. It is judged by the
logarithm of actual over predicted, by medians, against its siblings.
So a fleet that is slow altogether, or whose rates are guessed wrongly, ejects nobody.

Only requests that were sent in the same seconds are compared: those of a busy moment are
late everywhere, and those of a quiet one nowhere. A burst makes its own seconds uneven,
so one must be late in several such spans in a row.

The ratio does not correct the price: it holds one sort of request (first ids), carries
the waits of others, and would move all prices by its noise. Ejection is rare, bounded
in time and number, and ends by a probe.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from statistics import median

from router.gates import Gate

# Makes a deviation of normal noise from a median of absolute deviations.
_NORMAL = 1.4826
LOOK_S = 1.0
# Answers of a replica in a span, of which the last are kept.
_MOST_ANSWERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierLimits:
    """When a replica is an outlier, and how long it is left out.

    Attributes:
        window_s: Answers count for so long.
        span_s: Requests that were sent within so long are compared.
        spans: It must be late in so many spans in a row, of those that tell anything.
        samples: In those spans it must have given so many answers, together.
        siblings: Others that answered in a span, as many as it takes to compare with.
        ratio: It must be later than its siblings by this factor (0: nobody is ever left out) ...
        deviations: ... and by so many deviations among them.
        slack_s: Added to both times: less than this is no lateness.
        eject_s: How long it gets nothing for the first time; it doubles.
        most_eject_s: The longest time.
        share: Of the replicas, at most, that are left out at once; never the last.
    """

    window_s: float = 60.0
    span_s: float = 5.0
    spans: int = 4
    samples: int = 8
    siblings: int = 2
    ratio: float = 3.0
    deviations: float = 5.0
    slack_s: float = 0.25
    eject_s: float = 30.0
    most_eject_s: float = 300.0
    share: float = 1 / 3


class Seat:
    """One replica, in one life, among those of its model."""

    def __init__(self, outliers: "Outliers") -> None:
        self.gate = Gate(outliers.limits.eject_s, outliers.limits.most_eject_s)
        self._outliers = outliers

    def __repr__(self) -> str:
        return f"<Seat {self.gate.trips} ejections>"

    def allows(self, now: float) -> bool:
        """Whether a request may be sent."""
        return self.gate.allows(now)

    def reason(self, now: float) -> str:
        """Return why no request may be sent, for people; empty when one may."""
        return self.gate.reason(
            now,
            shut="it answers much later than its siblings",
            trying="it answered much later than its siblings; one request tries it",
        )

    def on_sent(self, now: float) -> "Trial":
        """A request is sent, whatever `allows` says."""
        return Trial(self, probes=self.gate.take(now))

    def answered(self, predicted_s: float, actual_s: float, now: float, *, probes: bool) -> None:
        """The first ids of a request came."""
        slack_s = self._outliers.limits.slack_s
        lateness = math.log((actual_s + slack_s) / (predicted_s + slack_s))
        if self.gate.closed:
            self._outliers.note(self, lateness, now - actual_s, now)
        elif probes:
            self._outliers.try_again(self, lateness, now - actual_s, now)

    def leave(self) -> None:
        """Its life has ended."""
        self._outliers.leave(self)


class Trial:
    """One request's answer to its seat. An answer of before an ejection says nothing new."""

    __slots__ = ("_probes", "_seat", "_settled", "_trips")

    def __init__(self, seat: Seat, *, probes: bool) -> None:
        self._seat = seat
        self._probes = probes
        self._trips = seat.gate.trips
        self._settled = False

    def answered(self, predicted_s: float, actual_s: float, now: float) -> None:
        """Its first ids came."""
        if self._settle():
            self._seat.answered(predicted_s, actual_s, now, probes=self._probes)

    def failed(self, now: float) -> None:
        """It failed before, by the replica's fault."""
        if self._settle() and self._probes and not self._seat.gate.closed:
            self._seat.gate.trip(now)

    def free(self) -> None:
        """It ended without an answer that counts."""
        if self._settle() and self._probes and not self._seat.gate.closed:
            self._seat.gate.give_back()

    def _settle(self) -> bool:
        first, self._settled = not self._settled, True
        return first and self._trips == self._seat.gate.trips


class _Span:
    """Answers to what was sent within some seconds."""

    def __init__(self) -> None:
        self.known: dict[Seat, float] = {}
        self.late: set[Seat] = set()
        self._answers: defaultdict[Seat, array[float]] = defaultdict(lambda: array("d"))
        self._changed = False

    def tells(self, seat: Seat, limits: OutlierLimits) -> bool:
        """Whether a replica can be compared in it."""
        return seat in self.known and len(self.known) > limits.siblings

    def count(self, seat: Seat) -> int:
        return len(self._answers[seat])

    def add(self, seat: Seat, lateness: float) -> None:
        answers = self._answers[seat]
        answers.append(lateness)
        del answers[:-_MOST_ANSWERS]
        self._changed = True

    def drop(self, seat: Seat) -> None:
        self._answers.pop(seat, None)
        self.known.pop(seat, None)
        self.late.discard(seat)

    def judge(self, limits: OutlierLimits) -> None:
        """Find who is late in it, if anything came since that was done."""
        if not self._changed:
            return
        self._changed = False
        self.known = {seat: median(late) for seat, late in self._answers.items()}
        # Only who is later than the middle of all needs a closer look.
        bound = median(self.known.values() or [0.0]) + math.log(limits.ratio)
        above = [seat for seat, late in self.known.items() if late > bound]
        self.late = {seat for seat in above if self.is_late(seat, self.known[seat], limits)}

    def is_late(self, seat: Seat, lateness: float, limits: OutlierLimits) -> bool:
        """Whether a replica that is so late is an outlier among its siblings."""
        others = [late for other, late in self.known.items() if other is not seat]
        if len(others) < limits.siblings:
            return False
        bound = max(math.log(limits.ratio), limits.deviations * _spread(others))
        return lateness - median(others) > bound


class Outliers:
    """The replicas of one model."""

    def __init__(self, limits: OutlierLimits) -> None:
        self.limits = limits
        self._seats: set[Seat] = set()
        self._spans: dict[int, _Span] = {}
        self._looked_at = float("-inf")

    def __len__(self) -> int:
        return len(self._seats)

    def join(self) -> Seat:
        """Return the seat of a replica whose life begins."""
        seat = Seat(self)
        self._seats.add(seat)
        return seat

    def leave(self, seat: Seat) -> None:
        """A replica's life has ended. Idempotent."""
        self._seats.discard(seat)
        self._forget(seat)

    @property
    def ejected(self) -> int:
        """Replicas that are left out, those being tried included."""
        return sum(not seat.gate.closed for seat in self._seats)

    def note(self, seat: Seat, lateness: float, sent_at: float, now: float) -> None:
        """A request was answered; eject outliers, if there are any, about once a second."""
        if not self.limits.ratio or seat not in self._seats:
            return
        number = self._number(sent_at)
        if number not in self._spans:
            self._spans[number] = _Span()
        self._spans[number].add(seat, lateness)
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._look(now)

    def try_again(self, seat: Seat, lateness: float, sent_at: float, now: float) -> None:
        """The probe of an ejected replica was answered: take it back, or leave it out longer."""
        span = self._spans.get(self._number(sent_at), _Span())
        span.judge(self.limits)
        if span.is_late(seat, lateness, self.limits):
            seat.gate.trip(now)
        else:
            seat.gate.close()

    def _number(self, instant: float) -> int:
        return int(instant // self.limits.span_s)

    def _look(self, now: float) -> None:
        self._drop_old(now)
        for span in self._spans.values():
            span.judge(self.limits)
        for seat in {seat for span in self._spans.values() for seat in span.late}:
            room = self.ejected + 1 <= int(len(self._seats) * self.limits.share)
            if room and self._stays_late(seat):
                seat.gate.trip(now)
                self._forget(seat)

    def _stays_late(self, seat: Seat) -> bool:
        newest_first = (self._spans[number] for number in sorted(self._spans, reverse=True))
        told = [span for span in newest_first if span.tells(seat, self.limits)]
        row = list(takewhile(lambda span: seat in span.late, told))
        answers = sum(span.count(seat) for span in row)
        return len(row) >= self.limits.spans and answers >= self.limits.samples

    def _drop_old(self, now: float) -> None:
        oldest = self._number(now - self.limits.window_s)
        for number in [each for each in self._spans if each < oldest]:
            del self._spans[number]

    def _forget(self, seat: Seat) -> None:
        """Start over with what comes from now on."""
        for span in self._spans.values():
            span.drop(seat)


def _spread(values: Iterable[float]) -> float:
    """How far values lie apart, robustly: what a few odd ones are does not matter."""
    values = list(values)
    middle = median(values)
    return _NORMAL * median(abs(value - middle) for value in values)
