"""One replica's feed: snapshot, then numbered changes, proven by digests; else not trusted.

Knows sequence numbers and the meta-tree; no wire, no loop, no clock (instants
come as `now`). The rule: the view is EXACT only while it follows from a complete
snapshot and every change after it. On a gap, an unknown parent or a digest that
differs it drops the view at once, holds later changes back (boundedly many) and
asks for a new snapshot. When a change comes too early what is missing has a moment to
come too: the view is not trusted meanwhile, a snapshot is asked for, but what was is kept.

A replica may also say too little without contradicting itself. What gives it away is
that it reuses blocks of which it never told: then the view is DEGRADED until it reuses
some that it told of.
"""

import enum
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixmesh.waits import Growing
from router.fleet.changes import Change, Chunk, Cleared, Digest, Removed, Stored
from router.fleet.held import Held
from router.fleet.meters import Meters, ViewLoss
from router.fleet.untold import Untold
from router.policy.choice import View
from router.tree.meta_tree import FeedBroken, MetaTree

SNAPSHOT_TIMEOUT_S = 10.0  # without progress
SILENCE_S = 15.0  # without a digest, which comes at every heartbeat
STRIKES = 3
STRIKE_WINDOW_S = 60.0
REST_S = 5.0  # the first one; they double
REST_MAX_S = 60.0
REORDER_WINDOW = 8  # changes that may come before one that is missing
REORDER_S = 0.25  # and for how long

_RESTS = Growing(REST_S, REST_MAX_S)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Index:
    """What the feeds of all replicas share: the tree and the meters."""

    tree: MetaTree = field(default_factory=MetaTree)
    meters: Meters = field(default_factory=Meters)


class _Stage(enum.Enum):
    OFF = enum.auto()  # no link
    WAITING = enum.auto()  # for a snapshot to begin
    LOADING = enum.auto()
    LIVE = enum.auto()
    RESTING = enum.auto()  # given up for a while


class Feed:
    """Keeps one replica's part of the meta-tree equal to its cache, or says that it isn't.

    Args:
        index: Where the keys go.
        ask: Asks the replica for a new snapshot.
        on_lost: Told the instant at which the view stopped being trusted.
        name: For logs.
    """

    def __init__(
        self,
        index: Index,
        *,
        ask: Callable[[], None],
        on_lost: Callable[[float], None],
        name: str,
    ) -> None:
        self._tree = index.tree
        self._meters = index.meters
        self._ask = ask
        self._on_lost = on_lost
        self._name = name
        self.number = self._tree.join()
        self.view = View.DEGRADED
        self._stage = _Stage.OFF
        self._last = 0
        self._held = Held()
        self._progress_at = 0.0
        self._missing_since: float | None = None
        self._untold = Untold()
        self._strikes: deque[float] = deque()
        self._rests = 0  # in a row
        self._retry_at = 0.0

    def __repr__(self) -> str:
        return f"<Feed of {self._name}: {self.view.name}, {self._stage.name} at {self._last}>"

    @property
    def block_count(self) -> int:
        """Blocks of the replica's cache, by the feed so far."""
        return self._tree.digest(self.number)[0]

    @property
    def has_snapshot(self) -> bool:
        """Whether a complete snapshot is the base of the view."""
        return self._stage is _Stage.LIVE

    def begin(self, now: float) -> None:
        """The link is up: the replica sends a snapshot without being asked."""
        self._reset(_Stage.WAITING, now)

    def stop(self, now: float) -> None:
        """The link is down or the replica has gone: nothing is known of it any more."""
        self._reset(_Stage.OFF, now)

    def close(self) -> None:
        """Leave the tree for good."""
        self._tree.leave(self.number)

    def _reset(self, stage: _Stage, now: float) -> None:
        self._tree.clear(self.number)
        self._held, self._untold = Held(), Untold()
        self._missing_since = None
        self._strikes.clear()
        self._rests = 0
        self._stage, self.view, self._progress_at = stage, View.DEGRADED, now

    def on_chunk(self, chunk: Chunk, now: float) -> None:
        """A part of a snapshot came."""
        if self._stage is _Stage.OFF:
            return
        if chunk.first:
            self._drop_view()
            self._missing_since = None
            self._last, self._stage = chunk.as_of, _Stage.LOADING
            self._distrust(View.DEGRADED, now)
        elif self._stage is not _Stage.LOADING or chunk.as_of != self._last:
            return  # the rest of a snapshot that was dropped
        self._progress_at = now
        try:
            self._tree.store_pairs(self.number, chunk.keys, chunk.parents)
        except FeedBroken as error:
            self._lose(ViewLoss.CONTRADICTION, str(error), now)
            return
        self._untold.told(chunk.keys)
        if chunk.last:
            self._complete(now)

    def on_change(self, sequence: int, change: Change, now: float) -> None:
        """A numbered change came."""
        if self._stage is _Stage.LIVE and sequence > self._last + 1 + REORDER_WINDOW:
            self._lose(ViewLoss.GAP, f"change {sequence} came after {self._last}", now)
        if self._stage is not _Stage.LIVE:
            if self._stage in (_Stage.WAITING, _Stage.LOADING):
                self._held.add(sequence, change)
            return
        if sequence == self._last + 1:
            self._apply(sequence, change, now)
            if self._missing_since is not None:
                self._catch_up(now)
        elif sequence > self._last:
            self._early(sequence, change, now)

    def _early(self, sequence: int, change: Change, now: float) -> None:
        if self._missing_since is None:
            self._doubt(f"change {sequence} came after {self._last}", now)
        self._held.add(sequence, change)
        if sequence not in self._held:
            # What was forgotten would be missing from a view that counts as whole.
            self._lose(ViewLoss.GAP, "too much came too early", now)

    def on_reused(self, keys: Sequence[int]) -> None:
        """The replica said that it found these leading blocks of a prompt in its cache.

        What it never tells of, though it has it, gives a silent publisher away.
        """
        if self._stage is not _Stage.LIVE or not keys or self._tree.is_partial(self.number):
            return
        told = self._tree.holds(self.number, keys[-1])
        self._untold.reused(keys[-1], told=told)
        if told:
            self._trust()

    def on_digest(self, digest: Digest, now: float) -> None:
        """The replica says what its cache holds."""
        if self._stage is not _Stage.LIVE:
            self._held.digest = digest
            return
        if digest.sequence < self._last:
            return
        if digest.sequence > self._last:
            why = f"a digest of change {digest.sequence} came after {self._last}"
            self._lose(ViewLoss.GAP, why, now)
        elif (digest.block_count, digest.xor_keys) != self._tree.digest(self.number):
            self._lose(ViewLoss.DIGEST, "the digest differs", now)
        else:
            self._progress_at = now
            if self._untold.proven():
                self._meters.view_lost(ViewLoss.MUTE)
                logger.warning("replica hides its cache", extra={"replica": self._name})
                self._distrust(View.DEGRADED, now)
            if not self._recent_strikes(now):
                self._rests = 0

    def tick(self, now: float) -> None:
        """Notice what did not come."""
        silent_s = now - self._progress_at
        if self._stage in (_Stage.WAITING, _Stage.LOADING) and silent_s > SNAPSHOT_TIMEOUT_S:
            self._lose(ViewLoss.SILENCE, "the snapshot is late", now)
        elif self._stage is _Stage.LIVE and silent_s > SILENCE_S:
            self._lose(ViewLoss.SILENCE, "the feed is silent", now)
        elif self._missing_since is not None and now - self._missing_since > REORDER_S:
            self._lose(ViewLoss.GAP, f"change {self._last + 1} is missing", now)
        elif self._stage is _Stage.RESTING and now >= self._retry_at:
            self._stage, self._progress_at = _Stage.WAITING, now
            self._request()

    def _complete(self, now: float) -> None:
        """The snapshot is whole: apply what was held back, in order."""
        self._stage = _Stage.LIVE
        self._missing_since = None
        self._trust()
        held, digest = self._held.in_order(), self._held.digest
        self._held.clear()
        for sequence, change in held:
            self.on_change(sequence, change, now)
        if digest is not None:
            self.on_digest(digest, now)

    def _catch_up(self, now: float) -> None:
        """What came too early is in order now, as far as nothing else is missing."""
        while self._stage is _Stage.LIVE and self._last + 1 in self._held:
            self._apply(self._last + 1, self._held.pop(self._last + 1), now)
        if self._stage is _Stage.LIVE and not self._held:
            self._missing_since = None
            if self._strikes:
                self._strikes.pop()  # nothing was lost
            self._trust()

    def _apply(self, sequence: int, change: Change, now: float) -> None:
        try:
            match change:
                case Stored():
                    self._tree.store(self.number, change.parent, change.keys)
                    self._untold.told(change.keys)
                case Removed():
                    self._tree.remove(self.number, change.keys)
                case Cleared():
                    self._tree.clear(self.number)
        except FeedBroken as error:
            self._lose(ViewLoss.CONTRADICTION, str(error), now)
        else:
            self._last = sequence
            self._meters.applied(change)

    def _doubt(self, why: str, now: float) -> None:
        """A change is missing: trust the view no more, ask, and keep it for a moment."""
        self._strike(ViewLoss.GAP, why, now)
        self._distrust(View.DEGRADED, now)
        self._missing_since = now
        self._request()

    def _lose(self, loss: ViewLoss, why: str, now: float) -> None:
        """The view can't be trusted: drop it; ask again, or rest after too many times."""
        doubted = self._missing_since is not None
        self._drop_view()
        self._missing_since = None
        if not doubted:
            self._strike(loss, why, now)
        if loss is not ViewLoss.GAP:
            self._held.clear()  # else what came after the gap may follow the repair
        if self._recent_strikes(now) >= STRIKES or self.view is View.BLIND:
            self._rest(now)
            return
        self._distrust(View.DEGRADED, now)
        self._stage, self._progress_at = _Stage.WAITING, now
        if not doubted:
            self._request()

    def _strike(self, loss: ViewLoss, why: str, now: float) -> None:
        self._meters.view_lost(loss)
        self._strikes.append(now)
        strikes = self._recent_strikes(now)
        logger.warning(
            "replica view lost", extra={"replica": self._name, "why": why, "strikes": strikes}
        )

    def _rest(self, now: float) -> None:
        self._distrust(View.BLIND, now)
        self._stage = _Stage.RESTING
        self._held.clear()
        self._rests += 1
        self._retry_at = now + _RESTS.seconds(self._rests)

    def _request(self) -> None:
        self._meters.resync()
        self._ask()

    def _trust(self) -> None:
        """The view is whole, unless something is missing or hidden."""
        doubted = self._untold.mute or self._missing_since is not None
        self.view = View.DEGRADED if doubted else View.EXACT

    def _distrust(self, view: View, now: float) -> None:
        was = self.view
        self.view = max(was, view)
        if was is View.EXACT:
            self._on_lost(now)

    def _drop_view(self) -> None:
        # What is booked there still comes.
        self._tree.clear(self.number, keep_marks=True)
        self._untold.clear()

    def _recent_strikes(self, now: float) -> int:
        while self._strikes and now - self._strikes[0] > STRIKE_WINDOW_S:
            self._strikes.popleft()
        return len(self._strikes)
