"""A group's link without a link: what the group would say is called, what it is sent is kept."""

from collections.abc import Sequence
from random import Random

from radixmesh.errors import MeshError
from router.fleet.ask import SubmitSpec, WorkerSink
from router.fleet.booking import Booking
from router.fleet.changes import Chunk
from router.fleet.feed import Index
from router.fleet.fitness import Judges
from router.fleet.registry import Fleet
from router.fleet.replica import Reported
from router.fleet.wire import GroupInfo
from router.fleet.worker_link import Entry, GroupEvents, Ticket
from router.fleet.workload import Report
from router.policy.choice import Policy
from router.policy.price import Price
from router.tree.meta_tree import MetaTree

INFO = GroupInfo(
    model="tiny",
    weight_version="",
    fingerprint="f1",
    block_tokens=4,
    topology="dp=1 pp=1 tp=1",
    engine="fake",
    dp=1,
    max_model_len=4096,
    max_running=64,
    step_tokens=512,
    kv_blocks=4096,
    vocab_size=1000,
    eos_ids=(2,),
)


class FakeClock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class FakeGroupLink:
    """The seam between a group and its link."""

    def __init__(self, address: str, events: GroupEvents) -> None:
        self.address = address
        self.events = events
        self.resnapshots: list[int] = []
        self.entries: dict[int, Entry] = {}
        self.last_entry = 0
        self.connected = True
        self.pending_bytes = 0

    async def run(self) -> None:
        raise NotImplementedError

    def submit(self, booking: Booking, spec: SubmitSpec, sink: WorkerSink) -> Ticket:
        entry = Entry(sink, booking)
        self.last_entry += 1
        entry.entry_id = self.last_entry
        self.entries[entry.entry_id] = entry
        booking.entry_opened(entry.entry_id)
        return Ticket(lambda: self.cancel(entry))

    def cancel(self, entry: Entry) -> None:
        if self.entries.pop(entry.entry_id, None) is entry:
            entry.booking.entry_closed()

    def fail_replica(self, dp_rank: int, keep: int | None, error: MeshError) -> None:
        for entry in list(self.entries.values()):
            booking = entry.booking
            if booking.dp_rank == dp_rank and booking.incarnation != keep:
                del self.entries[entry.entry_id]
                entry.on_failed(error)

    def answer(self, entry: Entry) -> None:
        """An output gets its first ids."""
        entry.booking.began()
        entry.sink.on_tokens(0, b"\0\0\0\0", [], 0)

    def finish(self, entry: Entry) -> None:
        """An output ends well."""
        del self.entries[entry.entry_id]
        entry.booking.began()
        entry.booking.finished()
        entry.booking.entry_closed()

    def fail(self, entry: Entry, error: MeshError) -> None:
        """An output ends by an error."""
        del self.entries[entry.entry_id]
        entry.on_failed(error)

    def resnapshot(self, dp_rank: int) -> None:
        self.resnapshots.append(dp_rank)

    def up(self, *, dp: int = 1, info: GroupInfo = INFO, incarnation: int = 1) -> None:
        """The group comes up with empty caches: info, states, snapshots."""
        self.events.on_up(is_new=True)
        self.events.on_info(info)
        for rank in range(dp):
            self.events.on_status(rank, incarnation, Reported.UP)
            self.holds(rank, (), incarnation=incarnation)
            self.events.on_report(rank, incarnation, Report(free_blocks=info.kv_blocks))
        self.events.on_frame_end()

    def holds(self, rank: int, keys: Sequence[int], *, incarnation: int = 1) -> None:
        """A snapshot: the replica holds one chain of keys."""
        parents = [0, *keys[:-1]] if keys else []
        chunk = Chunk(0, keys, parents, first=True, last=True)
        self.events.on_chunk(rank, incarnation, chunk)


class FakeFleet:
    """A fleet whose links are FakeGroupLinks, with a clock that stands."""

    def __init__(
        self, *names: str, policy: Policy | None = None, seed: int = 1, judges: Judges | None = None
    ) -> None:
        self.clock = FakeClock()
        self.links: dict[str, FakeGroupLink] = {}
        self.tree = MetaTree()
        self.fleet = Fleet(
            policy=policy or Price(),
            connect=self._connect,
            index=Index(self.tree),
            judges=judges,
            clock=self.clock,
            rng=Random(seed),
        )
        for name in names:
            self.fleet.add_group(f"{name}:1", name)

    @property
    def settled(self) -> bool:
        """Whether each group has sent its snapshots, or had its time."""
        return all(group.settled(self.clock.now) for group in self.fleet.groups)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and let the fleet notice it."""
        self.clock.advance(seconds)
        self.fleet.tick()

    def _connect(self, address: str, events: GroupEvents) -> FakeGroupLink:
        link = FakeGroupLink(address, events)
        self.links[address.removesuffix(":1")] = link
        return link
