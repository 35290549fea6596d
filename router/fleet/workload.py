"""How much work a replica has: what it reports, plus what it can't have seen yet.

A report is absolute and counts the work of all routers, so it replaces what was
known. Only this router's bookings that the report does not include come on top.
When reports stop, the router's own bookings are all that is left to go by.
Knows no wire and no clock (instants come as `now`).
"""

from dataclasses import dataclass, field, replace

REPORT_LIFE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Absolute load of a replica; `seen_entry_id` is the last of our entries that it includes."""

    running: int = 0
    waiting: int = 0
    uncached_tokens: int = 0
    free_blocks: int = 0
    prefill_rate: float = 0.0
    decode_step_s: float = 0.0
    seen_entry_id: int = 0


@dataclass(slots=True, eq=False)
class Charge:
    """What one booking puts on a replica.

    Attributes:
        tokens: Prompt ids to compute; siblings share them.
        blocks: KV blocks that the prompt needs.
        resume: Whether it continues an interrupted stream.
        entry_ids: Numbers of its entries on the link; none before it is sent.
    """

    tokens: int
    blocks: int
    resume: bool = False
    entry_ids: list[int] = field(default_factory=list)
    started: bool = False

    @property
    def entries(self) -> int:
        """Requests in the replica's queue or batch; one is coming when none is sent yet."""
        return max(1, len(self.entry_ids))


class Workload:
    """The work of one replica. `kv_blocks` is the size of its KV cache."""

    def __init__(self) -> None:
        self.kv_blocks = 0
        self._report = Report()
        self._reported_at: float | None = None
        self._charges: dict[Charge, None] = {}
        self._unseen: dict[Charge, None] = {}

    def __len__(self) -> int:
        return len(self._charges)

    @property
    def entries(self) -> int:
        """Requests of this router there."""
        return sum(charge.entries for charge in self._charges)

    @property
    def unstarted_resumes(self) -> int:
        """Interrupted streams that wait there for their prefill."""
        return sum(1 for charge in self._charges if charge.resume and not charge.started)

    def report(self, report: Report, now: float) -> None:
        """The replica said how it is."""
        self._report = report
        self._reported_at = now
        seen = [charge for charge in self._unseen if self._includes(charge, report.seen_entry_id)]
        for charge in seen:
            del self._unseen[charge]

    @staticmethod
    def _includes(charge: Charge, seen_entry_id: int) -> bool:
        return bool(charge.entry_ids) and charge.entry_ids[-1] <= seen_entry_id

    def book(self, charge: Charge) -> None:
        """Count a booking from now on."""
        self._charges[charge] = None
        self._unseen[charge] = None

    def release(self, charge: Charge) -> None:
        """Count it no more. Idempotent."""
        self._charges.pop(charge, None)
        self._unseen.pop(charge, None)

    def forget(self) -> None:
        """The replica is another one now: its reports mean nothing, bookings are gone with it."""
        self._report = Report()
        self._reported_at = None
        self._charges.clear()
        self._unseen.clear()

    @property
    def prefill_rate(self) -> float:
        """Prompt ids a second, as last reported; 0 when not known."""
        return self._report.prefill_rate

    def is_fresh(self, now: float) -> bool:
        """Whether the last report still counts."""
        return self._reported_at is not None and now - self._reported_at <= REPORT_LIFE_S

    def at(self, now: float) -> Report:
        """Return the load as it must be now."""
        if not self.is_fresh(now):
            return self._own()
        base = self._report
        if not self._unseen:
            return base
        return replace(
            base,
            waiting=base.waiting + sum(charge.entries for charge in self._unseen),
            uncached_tokens=base.uncached_tokens + sum(charge.tokens for charge in self._unseen),
            free_blocks=max(0, base.free_blocks - sum(charge.blocks for charge in self._unseen)),
        )

    def _own(self) -> Report:
        started = [charge for charge in self._charges if charge.started]
        pending = [charge for charge in self._charges if not charge.started]
        used = sum(charge.blocks for charge in self._charges)
        return replace(
            self._report,
            running=sum(charge.entries for charge in started),
            waiting=sum(charge.entries for charge in pending),
            uncached_tokens=sum(charge.tokens for charge in pending),
            free_blocks=max(0, self.kv_blocks - used),
        )
