"""One router's link to the group: its requests, its parts of steps, its copy of the feed.

Knows entries, frames and lanes; decides nothing about replicas. The whole feed of
a router (snapshots, events, proofs) leaves on the FEED lane, first in, first out: on two
lanes an event could overtake the snapshot that it builds on. So that a large snapshot
does not fill that lane, it is fed in piece by piece as the lane empties.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

from radixmesh.errors import Cancelled, MeshError
from radixmesh.rpc.link import Lane, Session
from radixmesh.worker.v1.feed_pb2 import Load
from radixmesh.worker.v1.worker_service_pb2 import AttachRequest, AttachResponse, Submit
from worker.front import wire
from worker.front.feed_out import Cursor, Event
from worker.front.group import Group
from worker.front.jobs import Job, StepPart
from worker.front.replica import Replica, ReplicaState
from worker.request import GOES_ON, LoadReport

FEED_LOW_WATER_BYTES = 256 << 10
FEED_POLL_S = 0.01
# A router that has work at a replica hears of a change of its load so soon, all others so soon:
# routers agree because they see the same.
LOAD_INTERVAL_S = 0.05
OTHERS_INTERVAL_S = 0.2
# A proof follows so many keys of events at the latest, else the next tick brings it.
PROOF_KEYS = 4_096


class RouterLink:
    """Handler of a link's session, owner of its jobs, subscriber to the group."""

    def __init__(self, session: Session[AttachResponse], group: Group) -> None:
        self._session = session
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[int, Job] = {}
        self._open_jobs: Counter[int] = Counter()  # by dp_rank
        self._seen: dict[int, int] = {}
        self._cursors: dict[int, Cursor] = {}
        self._unproven_keys: Counter[int] = Counter()
        self._sent_loads: dict[int, LoadReport] = {}
        self._feed_timer: asyncio.TimerHandle | None = None
        self._load_timer: asyncio.TimerHandle | None = None
        frame = AttachResponse(info=wire.info(group.info))
        frame.statuses.extend(wire.status(replica) for replica in group.replicas)
        frame.loads.append(wire.load(group.replicas, self._seen))
        session.send(frame, Lane.CONTROL)
        for replica in group.replicas:
            self._follow(replica)
        group.subscribers.add(self)
        self._pump_feed()

    def __repr__(self) -> str:
        return f"RouterLink({len(self._jobs)} jobs, {len(self._cursors)} feeds)"

    # Handler: what the router says.

    def on_frame(self, frame: AttachRequest) -> None:
        """Take submits and wishes for new snapshots."""
        for submit in frame.submits:
            self._submit(submit)
        for wish in frame.resnapshots:
            cursor = self._cursors.get(wish.dp_rank)
            if cursor is not None:
                cursor.begin()
        if frame.resnapshots:
            self._pump_feed()

    def on_closed(self, error: MeshError) -> None:
        """Forget the router; jobs that are left over end."""
        self._group.subscribers.discard(self)
        for timer in (self._feed_timer, self._load_timer):
            if timer is not None:
                timer.cancel()
        left = list(self._jobs.values())
        self._jobs.clear()
        self._cursors.clear()
        self._group.cancel(left, error.reason)

    def on_feed_dropped(self) -> None:
        """Begin all snapshots anew; statuses are not part of what was dropped."""
        self._group.meters.feed_dropped()
        for cursor in self._cursors.values():
            cursor.begin()
        self._pump_feed()

    def _submit(self, submit: Submit) -> None:
        entry_id = submit.entry_id
        on_cancel = partial(self._on_cancel, entry_id)
        if not self._session.open(entry_id, on_cancel, remaining_ms=submit.remaining_ms):
            return
        try:
            job = self._group.submit(self, entry_id, wire.to_ask(submit))
        except MeshError as error:
            self._session.fail(entry_id, error)
            return
        self._jobs[entry_id] = job
        self._open_jobs[job.dp_rank] += 1

    def _on_cancel(self, entry_id: int, error: MeshError) -> None:
        job = self._forget(entry_id)
        if job is not None:
            outcome = "cancelled" if isinstance(error, Cancelled) else error.reason
            self._group.cancel([job], outcome)

    def _forget(self, entry_id: int) -> Job | None:
        job = self._jobs.pop(entry_id, None)
        if job is not None:
            self._open_jobs[job.dp_rank] -= 1
        return job

    # Owner: what becomes of the jobs.

    def on_step(self, dp_rank: int, part: StepPart) -> None:
        """Send this router's part of a step, and the load with it."""
        replica = self._group.replicas[dp_rank]
        frame = AttachResponse()
        wire.add_step(frame, part, dp_rank=dp_rank, incarnation=replica.incarnation)
        frame.loads.append(self._load_of([replica]))
        self._session.send(frame, Lane.CONTROL)
        for entry_id, finish in zip(part.entry_ids, part.finishes, strict=True):
            if finish != GOES_ON:
                self._session.close(entry_id)
                self._forget(entry_id)

    def on_failed(self, entry_id: int, error: MeshError) -> None:
        """Send a typed failure."""
        self._forget(entry_id)
        self._session.fail(entry_id, error)

    def on_seen(self, dp_rank: int, entry_id: int) -> None:
        """Remember which of this router's submits the replica's load includes."""
        self._seen[dp_rank] = max(entry_id, self._seen.get(dp_rank, 0))

    # Subscriber: what becomes of the group and its replicas.

    def on_info(self) -> None:
        """Describe the group anew; replicas beyond those that it has now are gone."""
        dp = len(self._group.replicas)
        by_replica: list[dict[int, Any]] = [
            self._open_jobs,
            self._seen,
            self._cursors,
            self._unproven_keys,
            self._sent_loads,
        ]
        for known in by_replica:
            for dp_rank in [each for each in known if each >= dp]:
                del known[dp_rank]
        self._session.send(AttachResponse(info=wire.info(self._group.info)), Lane.CONTROL)

    def on_status(self, replica: Replica) -> None:
        """Announce a change; a new incarnation is followed from its beginning."""
        frame = AttachResponse(statuses=[wire.status(replica)])
        frame.loads.append(self._load_of([replica]))
        self._session.send(frame, Lane.CONTROL)
        self._follow(replica)
        self._pump_feed()

    def on_events(self, replica: Replica, events: Sequence[Event]) -> None:
        """Send cache changes, or leave them with the snapshot that is under way."""
        cursor = self._cursors.get(replica.dp_rank)
        if cursor is None:
            return
        now = [event for event in events if cursor.offer(event)]
        if not now:
            return
        frame = AttachResponse()
        wire.add_events(frame, now, replica)
        keys = self._unproven_keys[replica.dp_rank] + sum(event.key_count for event in now)
        if keys >= PROOF_KEYS:
            keys = 0
            wire.add_proof(frame, cursor.mirror.proof, replica)
        self._unproven_keys[replica.dp_rank] = keys
        self._session.send(frame, Lane.FEED)

    def on_load(self, replica: Replica) -> None:
        """Send a new load report soon, if this router has not had it."""
        if self._sent_loads.get(replica.dp_rank) == replica.load:
            return
        mine = self._open_jobs[replica.dp_rank] > 0
        due = self._loop.time() + (LOAD_INTERVAL_S if mine else OTHERS_INTERVAL_S)
        if self._load_timer is not None:
            if self._load_timer.when() <= due:
                return
            self._load_timer.cancel()
        self._load_timer = self._loop.call_at(due, self._send_loads)

    def on_tick(self) -> None:
        """Send all loads, and a proof of each cache that the router has in full."""
        loads = AttachResponse(loads=[self._load_of(self._group.replicas)])
        self._session.send(loads, Lane.CONTROL)
        proofs = AttachResponse()
        for dp_rank, cursor in self._cursors.items():
            if cursor.live:
                wire.add_proof(proofs, cursor.mirror.proof, self._group.replicas[dp_rank])
                self._unproven_keys[dp_rank] = 0
        if proofs.digests:
            self._session.send(proofs, Lane.FEED)

    def _send_loads(self) -> None:
        self._load_timer = None
        sent = self._sent_loads
        news = [one for one in self._group.replicas if sent.get(one.dp_rank) != one.load]
        if news:
            self._session.send(AttachResponse(loads=[self._load_of(news)]), Lane.CONTROL)

    def _load_of(self, replicas: list[Replica]) -> Load:
        for replica in replicas:
            self._sent_loads[replica.dp_rank] = replica.load
        return wire.load(replicas, self._seen)

    # The feed.

    def _follow(self, replica: Replica) -> None:
        cursor = self._cursors.get(replica.dp_rank)
        if replica.state is ReplicaState.DOWN:
            self._cursors.pop(replica.dp_rank, None)
        elif cursor is None or cursor.mirror is not replica.mirror:
            self._cursors[replica.dp_rank] = Cursor(replica.mirror)

    def _pump_feed(self) -> None:
        if self._feed_timer is not None:
            self._feed_timer.cancel()
            self._feed_timer = None
        for dp_rank, cursor in self._cursors.items():
            while not cursor.live:
                if self._session.feed_bytes > FEED_LOW_WATER_BYTES:
                    self._feed_timer = self._loop.call_later(FEED_POLL_S, self._pump_feed)
                    return
                self._send_next(cursor, self._group.replicas[dp_rank])

    def _send_next(self, cursor: Cursor, replica: Replica) -> None:
        part = cursor.take()
        frame = AttachResponse()
        if isinstance(part, list):
            wire.add_events(frame, part, replica)
        elif part is not None:
            if part.first:
                self._group.meters.snapshot(replica.dp_rank)
            wire.add_chunk(frame, part, replica)
        self._session.send(frame, Lane.FEED)
