"""The link to one worker group: protobuf on one side, plain values on the other.

The only module of the fleet that knows the worker's wire format. It takes the
columns of steps apart and gives each output its part; what concerns replicas it
passes to the group. It keeps no picture of the group.
"""

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from radixmesh.blocks import split_run
from radixmesh.errors import LinkLost, LinkOverloaded, MeshError
from radixmesh.rpc.link import Identity, Lane, Link, LinkLimits, Peer
from radixmesh.worker.v1 import feed_pb2, worker_service_pb2, worker_service_pb2_grpc
from router.fleet.ask import SubmitSpec, WorkerSink
from router.fleet.booking import Booking
from router.fleet.changes import Change, Chunk, Digest
from router.fleet.replica import Reported
from router.fleet.wire import GroupInfo, from_event, from_info, from_load, to_submit
from router.fleet.workload import Report

logger = logging.getLogger(__name__)

_STATES = frozenset(int(state) for state in Reported)


class GroupEvents(Protocol):
    """Who is told what a group says of itself and its replicas."""

    def on_up(self, instance_id: str = "", *, is_new: bool) -> None:
        """The link is up to this process; `is_new`: another one than before."""

    def on_info(self, info: GroupInfo) -> None:
        """The group described itself."""

    def on_status(self, dp_rank: int, incarnation: int, reported: Reported) -> None:
        """A replica changed state."""

    def on_chunk(self, dp_rank: int, incarnation: int, chunk: Chunk) -> None:
        """A part of a snapshot."""

    def on_change(self, dp_rank: int, incarnation: int, sequence: int, change: Change) -> None:
        """A numbered change of a cache."""

    def on_digest(self, dp_rank: int, incarnation: int, digest: Digest) -> None:
        """A proof of a cache."""

    def on_report(self, dp_rank: int, incarnation: int, report: Report) -> None:
        """The load of a replica."""

    def on_step(self, dp_rank: int, incarnation: int) -> None:
        """A replica has made a step."""

    def on_frame_end(self) -> None:
        """Everything of one frame was told."""

    def on_down(self, error: MeshError) -> None:
        """The link is lost; every output on it was told."""


class Entry:
    """One output on the link: its sink, its booking, and that both end once."""

    __slots__ = ("_started", "booking", "entry_id", "sink")

    def __init__(self, sink: WorkerSink, booking: Booking) -> None:
        self.sink = sink
        self.booking = booking
        self.entry_id = 0
        self._started = False

    def on_started(self, cached_tokens: int, waited_s: float) -> None:
        """Its prefill began, once; it can't have found more than there are blocks of the prompt."""
        if self._started:
            return
        self._started = True
        found = min(cached_tokens, self.booking.prompt_blocks * self.booking.block_tokens)
        self.booking.started(found)
        self.sink.on_started(found, waited_s)

    def on_failed(self, error: MeshError, /) -> None:
        """It ended by an error."""
        self.booking.failed(error.reason)
        self.booking.entry_closed()
        self.sink.on_failed(error)


class Ticket:
    """The right to give up one output."""

    __slots__ = ("_give_up",)

    def __init__(self, give_up: Callable[[], None]) -> None:
        self._give_up = give_up

    def cancel(self) -> None:
        """Tell the worker to stop; nothing is told to the sink any more. Idempotent."""
        self._give_up()


class WorkerLink:
    """A link to a group's front, dialled again for ever while `run` runs."""

    def __init__(
        self,
        address: str,
        events: GroupEvents,
        *,
        identity: Identity,
        limits: LinkLimits | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._events = events
        self._link: Link[
            worker_service_pb2.AttachRequest, worker_service_pb2.AttachResponse, Entry
        ] = Link(
            address,
            attach=lambda channel: worker_service_pb2_grpc.WorkerServiceStub(channel).Attach,
            down=worker_service_pb2.AttachRequest,
            listener=self,
            identity=identity,
            limits=limits or LinkLimits(),
            rng=rng,
        )

    def __repr__(self) -> str:
        return f"<WorkerLink over {self._link!r}>"

    @property
    def connected(self) -> bool:
        """Whether the link is up."""
        return self._link.connected

    @property
    def entries(self) -> Mapping[int, Entry]:
        """The outputs on it, by number; a live view."""
        return self._link.entries

    @property
    def pending_bytes(self) -> int:
        """Unsent bytes."""
        return self._link.pending_bytes

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        await self._link.run()

    def submit(self, booking: Booking, spec: SubmitSpec, sink: WorkerSink) -> Ticket:
        """Send one output to the booked replica.

        Raises:
            LinkLost: The link is down.
            LinkOverloaded: Its buffer is full.
            InvalidRequest: The prompt is larger than a link carries.
        """
        entry = Entry(sink, booking)
        entry.entry_id = self._link.open(entry, timeout_s=spec.timeout_s)
        frame = worker_service_pb2.AttachRequest()
        frame.submits.append(to_submit(entry.entry_id, booking.dp_rank, spec))
        try:
            self._link.send(frame, Lane.WORK, entry_id=entry.entry_id)
        except MeshError:
            self._link.close(entry.entry_id)
            raise
        booking.entry_opened(entry.entry_id)
        return Ticket(lambda: self.cancel(entry))

    def cancel(self, entry: Entry) -> None:
        """Give up an output; its sink is told nothing."""
        if self._link.entries.get(entry.entry_id) is entry:
            self._link.cancel(entry.entry_id)
            entry.booking.entry_closed()

    def fail_replica(self, dp_rank: int, keep: int | None, error: MeshError) -> None:
        """Fail every output of a replica, but for those of incarnation `keep`."""
        for entry in list(self._link.entries.values()):
            booking = entry.booking
            if booking.dp_rank == dp_rank and booking.incarnation != keep:
                # The submit may reach the next incarnation: take it back there.
                self._link.cancel(entry.entry_id)
                entry.on_failed(error)

    def resnapshot(self, dp_rank: int) -> None:
        """Ask for a new snapshot of a replica. Who asked will ask again when none comes."""
        frame = worker_service_pb2.AttachRequest()
        frame.resnapshots.add(dp_rank=dp_rank)
        try:
            self._link.send(frame, Lane.CONTROL)
        except (LinkLost, LinkOverloaded) as error:
            logger.warning("no snapshot asked for", extra={"error": error.message})

    def on_up(self, peer: Peer, /, *, is_new: bool) -> None:
        """The group's front said hello."""
        self._events.on_up(peer.instance_id, is_new=is_new)

    def on_down(self, error: MeshError, /) -> None:
        """The link is lost."""
        self._events.on_down(error)

    def on_frame(self, frame: worker_service_pb2.AttachResponse, /) -> None:
        """Take a frame apart.

        Outputs come first: what a replica generated before it went down counts. Then
        states, so that snapshots and changes meet the incarnation they belong to.
        """
        self._outputs(frame)
        if frame.HasField("info"):
            self._events.on_info(from_info(frame.info))
        for status in frame.statuses:
            self._status(status)
        self._feed(frame)
        for load in frame.loads:
            for dp_rank, incarnation, report in from_load(load):
                self._events.on_report(dp_rank, incarnation, report)
        self._events.on_frame_end()

    def _outputs(self, frame: worker_service_pb2.AttachResponse) -> None:
        entries = self._link.entries
        for accepted in frame.accepted:
            for entry_id in accepted.entry_ids:
                if entry_id in entries:
                    entries[entry_id].sink.on_accepted()
        for started in frame.started:
            if started.entry_id in entries:
                entry = entries[started.entry_id]
                entry.on_started(started.cached_tokens, started.waited_us / 1e6)
        for step in frame.steps:
            self._step(step)

    def _step(self, step: worker_service_pb2.Step) -> None:
        self._events.on_step(step.dp_rank, step.incarnation)
        runs = split_run(step.token_ids, step.counts)
        start = 0
        columns = zip(step.entry_ids, step.positions, runs, step.finishes, strict=True)
        for entry_id, position, ids, finish in columns:
            end = start + len(ids) // 4
            logprobs: Sequence[float] = step.logprobs[start:end]
            start = end
            entry = self._link.entries.get(entry_id)
            if entry is None or entry.booking.incarnation != step.incarnation:
                continue
            entry.booking.began()
            if finish:
                self._link.close(entry_id)
                entry.booking.finished()
                entry.booking.entry_closed()
            entry.sink.on_tokens(position, ids, logprobs, int(finish))

    def _status(self, status: feed_pb2.ReplicaStatus) -> None:
        if int(status.state) in _STATES:  # others are of a later version
            reported = Reported(status.state)
            self._events.on_status(status.dp_rank, status.incarnation, reported)

    def _feed(self, frame: worker_service_pb2.AttachResponse) -> None:
        events = self._events
        for part in frame.snapshots:
            keys, parents = list(part.keys), list(part.parents)
            chunk = Chunk(part.as_of_sequence, keys, parents, part.first, part.last)
            events.on_chunk(part.dp_rank, part.incarnation, chunk)
        for event in frame.events:
            change = from_event(event)
            if change is not None:
                events.on_change(event.dp_rank, event.incarnation, event.sequence, change)
        for said in frame.digests:
            digest = Digest(said.sequence, said.block_count, said.xor_keys)
            events.on_digest(said.dp_rank, said.incarnation, digest)
