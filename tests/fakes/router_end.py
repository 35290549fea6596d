"""A router's end of a worker link: sends submits, remembers answers, follows every feed.

Stands on the real `Link`; what it follows it checks against the contract.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from radixmesh.blocks import pack_ids, split_run, unpack_ids
from radixmesh.common.v1.sampling_pb2 import SamplingParams
from radixmesh.errors import MeshError
from radixmesh.rpc.link import Identity, Lane, Link, LinkLimits, Peer
from radixmesh.worker.v1 import feed_pb2
from radixmesh.worker.v1.worker_service_pb2 import (
    AttachRequest,
    AttachResponse,
    Resnapshot,
    Started,
    Step,
    Submit,
)
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub
from tests.fakes.feed_follower import FeedFollower

UP = feed_pb2.REPLICA_STATE_UP
DRAINING = feed_pb2.REPLICA_STATE_DRAINING
DOWN = feed_pb2.REPLICA_STATE_DOWN


@dataclass
class Output:
    """What became of one submit."""

    entry_id: int = 0
    ids: list[int] = field(default_factory=list)
    accepted: bool = False
    started: Started | None = None
    finish: int = 0
    error: MeshError | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # the first id came

    def on_failed(self, error: MeshError) -> None:
        assert not self.done.is_set(), "a second end"
        self.error = error
        self.done.set()

    def on_ids(self, position: int, ids: list[int], finish: int) -> None:
        assert not self.done.is_set(), "ids after the end"
        assert position == len(self.ids), "a gap in the output"
        self.ids += ids
        self.finish = finish
        self.begun.set()
        if finish:
            self.done.set()

    async def result(self) -> list[int]:
        """The whole output; raises the entry's failure."""
        await self.done.wait()
        if self.error is not None:
            raise self.error
        return self.ids

    async def failure(self) -> MeshError:
        """The failure; AssertionError when it finished instead."""
        await self.done.wait()
        assert self.error is not None, f"finished with {self.ids}"
        return self.error


class RouterEnd:
    """One router."""

    def __init__(self, address: str, name: str = "router") -> None:
        self.link: Link[AttachRequest, AttachResponse, Output] = Link(
            address,
            attach=lambda channel: WorkerServiceStub(channel).Attach,
            down=AttachRequest,
            listener=self,
            identity=Identity(name, f"{name}-1"),
            limits=LinkLimits(backoff_initial_s=0.02, backoff_max_s=0.2),
        )
        self.info: feed_pb2.GroupInfo | None = None
        self.instances: list[str] = []
        self.statuses: dict[int, feed_pb2.ReplicaStatus] = {}
        self.history: list[tuple[int, int]] = []  # (dp_rank, state)
        self.feeds: dict[int, FeedFollower] = defaultdict(FeedFollower)
        self.loads: dict[int, feed_pb2.Load] = {}
        self.frames = 0
        self.step_frames = 0
        self.strays = 0
        self.last_step = Step()
        self._news = asyncio.Event()

    # Listener.

    def on_up(self, peer: Peer, *, is_new: bool) -> None:
        self.instances.append(peer.instance_id)
        self.feeds.clear()

    def on_down(self, error: MeshError) -> None:
        self.statuses.clear()

    def on_frame(self, frame: AttachResponse) -> None:
        self.frames += 1
        if frame.HasField("info"):
            self.info = frame.info
        for status in frame.statuses:
            self.statuses[status.dp_rank] = status
            self.history.append((status.dp_rank, status.state))
        for load in frame.loads:
            self.loads.update(dict.fromkeys(load.dp_ranks, load))
        for chunk in frame.snapshots:
            self.feeds[chunk.dp_rank].take_chunk_message(chunk)
        for event in frame.events:
            self.feeds[event.dp_rank].take_event_message(event)
        for digest in frame.digests:
            self.feeds[digest.dp_rank].take_digest_message(digest)
        self._take_entries(frame)
        self._news.set()

    def _take_entries(self, frame: AttachResponse) -> None:
        entries = self.link.entries
        for accepted in frame.accepted:
            for entry_id in accepted.entry_ids:
                if entry_id in entries:
                    entries[entry_id].accepted = True
        for started in frame.started:
            if started.entry_id in entries:
                entries[started.entry_id].started = started
        for step in frame.steps:
            self.step_frames += 1
            self.last_step = step
            self._take_step(step)

    def _take_step(self, step: Step) -> None:
        runs = split_run(step.token_ids, step.counts)
        rows = zip(step.entry_ids, step.positions, runs, step.finishes, strict=True)
        for entry_id, position, run, finish in rows:
            output = self.link.entries.get(entry_id)
            if output is None:
                self.strays += 1
                continue
            output.on_ids(position, unpack_ids(run).tolist(), finish)
            if finish:
                self.link.close(entry_id)

    # What tests do.

    def submit(
        self,
        prompt: list[int],
        *,
        max_tokens: int = 8,
        dp_rank: int | None = None,
        timeout_s: float | None = None,
        **fields: object,
    ) -> Output:
        """Send a request."""
        output = Output()
        output.entry_id = self.link.open(output, timeout_s=timeout_s)
        message = self.submit_of(output.entry_id, prompt, max_tokens=max_tokens, dp_rank=dp_rank)
        if timeout_s is not None:
            message.remaining_ms = int(timeout_s * 1000)
        message.MergeFrom(Submit(**fields))  # type: ignore[arg-type]
        self.send(message)
        return output

    @staticmethod
    def submit_of(
        entry_id: int, prompt: list[int], *, max_tokens: int, dp_rank: int | None = None
    ) -> Submit:
        """A greedy request that ends by its limit only."""
        sampling = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True, temperature=0)
        return Submit(
            entry_id=entry_id, prompt_ids=pack_ids(prompt), sampling=sampling, dp_rank=dp_rank
        )

    def send(self, *submits: Submit) -> None:
        """Send submits in one frame, whatever they are."""
        self.link.send(AttachRequest(submits=submits), Lane.WORK)

    def resnapshot(self, dp_rank: int) -> None:
        """Ask for a new snapshot."""
        wish = AttachRequest(resnapshots=[Resnapshot(dp_rank=dp_rank)])
        self.link.send(wish, Lane.CONTROL)

    def state(self, dp_rank: int) -> int:
        """A replica's last announced state; 0 when it was not announced."""
        status = self.statuses.get(dp_rank)
        return status.state if status else 0

    async def until(self, what: Callable[[], bool]) -> None:
        """Wait until something holds; it is looked at after every frame."""
        while not what():
            self._news.clear()
            await self._news.wait()

    async def until_up(self, *dp_ranks: int) -> None:
        """Wait until replicas are up and their snapshots whole."""
        await self.until(
            lambda: all(self.state(each) == UP and self._fresh(each) for each in dp_ranks)
        )

    def _fresh(self, dp_rank: int) -> bool:
        feed = self.feeds[dp_rank]
        return feed.whole and feed.incarnation == self.statuses[dp_rank].incarnation


@asynccontextmanager
async def attach(address: str, name: str = "router") -> AsyncGenerator[RouterEnd, None]:
    """Run a router's link to a worker group."""
    router = RouterEnd(address, name)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(router.link.run())
        try:
            yield router
        finally:
            running.cancel()
