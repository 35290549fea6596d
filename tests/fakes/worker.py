"""A worker group in this process: the real WorkerService contract over a real link, no ranks.

Ids are those of `tests/fakes/oracle.py`, so a lost, doubled or swapped id shows.
By itself it answers at once, one id a step (`step_s` apart). With `paused` set it
only queues, and `step()` makes each running output's next id. What it was sent and
what was cancelled can be looked at; the feed can be made to misbehave.

    async with FakeWorker(dp=2) as worker:
        ... worker.address ...
        worker.restart_replica(1)           # DOWN, then UP with a new incarnation
        worker.lose_events = True           # events are counted and not sent
        await worker.kill()                 # the link breaks, the port is closed
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from radixmesh.blocks import Namespace, block_keys, pack_ids, unpack_ids
from radixmesh.errors import Draining, GroupLost, MeshError, NotSupported, TokenizerMismatch
from radixmesh.rpc.link import Identity, Lane, LinkLimits, Session, serve_link
from radixmesh.rpc.server import Server
from radixmesh.worker.v1 import feed_pb2
from radixmesh.worker.v1.worker_service_pb2 import (
    Accepted,
    AttachRequest,
    AttachResponse,
    Started,
    Step,
    Submit,
)
from radixmesh.worker.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from tests.fakes.oracle import oracle_output
from tests.fakes.worker_cache import FakeCache

SERVICE = "radixmesh.worker.v1.WorkerService"
STOP_TOKEN, LENGTH = 1, 3
UP, DRAINING, DOWN = 1, 2, 3
FAST = LinkLimits(
    heartbeat_s=0.1,
    peer_timeout_s=0.6,
    connect_timeout_s=0.5,
    backoff_initial_s=0.02,
    backoff_max_s=0.2,
)
_instances = itertools.count(1)
_incarnations = itertools.count(1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeShape:
    """What the group says of itself, and how it behaves from the start."""

    model: str = "tiny"
    fingerprint: str = ""
    weight_version: str = ""
    dp: int = 1
    block_tokens: int = 4
    kv_blocks: int = 4096
    max_model_len: int = 4096
    max_running: int = 64
    vocab_size: int = 1000
    ordinary: Sequence[int] = range(3, 300)
    step_s: float = 0.0
    tick_s: float = 0.05
    limits: LinkLimits = FAST


@dataclass(eq=False)
class _Run:
    """One output."""

    handler: "_Handler"
    submit: Submit
    ids: list[int]
    position: int
    keys: list[int]


@dataclass(eq=False)
class _Replica:
    cache: FakeCache
    state: int = UP
    runs: list[_Run] = field(default_factory=list)


class _Handler:
    """One router's link."""

    def __init__(self, worker: "FakeWorker", session: Session[AttachResponse]) -> None:
        self.worker = worker
        self.session = session
        self.seen: dict[int, int] = {}
        self.started: set[int] = set()
        frame = AttachResponse(info=worker.info())
        frame.statuses.extend(worker.status(rank) for rank in range(worker.shape.dp))
        self.session.send(frame, Lane.CONTROL)
        for rank in range(worker.shape.dp):
            self.snapshot(rank)

    def on_frame(self, frame: AttachRequest) -> None:
        for submit in frame.submits:
            self.worker.take(self, submit)
        for wish in frame.resnapshots:
            self.worker.resnapshots += 1
            self.snapshot(wish.dp_rank)

    def snapshot(self, rank: int) -> None:
        if not self.worker.silent_feed:
            for chunk in self.worker.replicas[rank].cache.snapshot():
                self.session.send(AttachResponse(snapshots=[chunk]), Lane.FEED)

    def on_closed(self, error: MeshError) -> None:
        self.worker.forget(self)

    def on_feed_dropped(self) -> None:
        for rank in range(self.worker.shape.dp):
            self.snapshot(rank)


class FakeWorker(WorkerServiceServicer):
    """A group with `shape.dp` replicas; keyword arguments are those of FakeShape.

    Attributes:
        submits: Every request that came, in order.
        cancelled: Entry numbers that ended without a finish, with the error.
        resnapshots: How often a router asked for a snapshot.
        paused: Queue, but generate nothing by itself.
        deaf: Say nothing to new requests, not even that they are queued.
        refuse: Errors for the next requests, one each.
        lose_events: Count cache events but don't send them.
        silent_feed: Send no snapshot, event or digest.
        silent_load: Send no load.
    """

    def __init__(self, *, port: int = 0, **shape: Any) -> None:
        self.shape = FakeShape(**shape)
        self.port = port
        self.instance_id = f"fake-{next(_instances)}"
        self.replicas = [_Replica(self._new_cache(rank)) for rank in range(self.shape.dp)]
        self.submits: list[Submit] = []
        self.cancelled: dict[int, MeshError] = {}
        self.resnapshots = 0
        self.paused = False
        self.deaf = False
        self.refuse: list[MeshError] = []
        self.lose_events = False
        self.silent_feed = False
        self.silent_load = False
        self._handlers: list[_Handler] = []
        self._server: Server | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._work = asyncio.Event()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    @property
    def address(self) -> str:
        """host:port; fixed once started, so that a restart comes back at the same place."""
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> int:
        """Outputs that have not ended."""
        return sum(len(replica.runs) for replica in self.replicas)

    async def start(self) -> str:
        """Listen; return the address."""
        register = (SERVICE, lambda server: add_WorkerServiceServicer_to_server(self, server))
        self._server = Server(self.address, [register])
        self.port = await self._server.start()
        self._loop_task = asyncio.get_running_loop().create_task(self._run())
        return self.address

    async def kill(self) -> None:
        """Break all links and stop listening, as if the process died."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait([self._loop_task])
            self._loop_task = None
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def restart(self) -> None:
        """Come back at the same port as another instance with empty caches."""
        await self.kill()
        self.instance_id = f"fake-{next(_instances)}"
        self.replicas = [_Replica(self._new_cache(rank)) for rank in range(self.shape.dp)]
        await self.start()

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await serve_link(
            request_iterator,
            context,
            up=AttachResponse,
            identity=Identity("worker", self.instance_id),
            accept=self._accept,
            limits=self.shape.limits,
        )

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        raise NotSupported("the fake speaks on links only")
        yield

    async def GetGroup(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("the fake speaks on links only")

    async def Drain(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("the fake speaks on links only")

    async def FlushCache(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("the fake speaks on links only")

    async def ScaleReplicas(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotSupported("the fake speaks on links only")

    def _accept(self, session: Session[AttachResponse]) -> _Handler:
        handler = _Handler(self, session)
        self._handlers.append(handler)
        return handler

    def forget(self, handler: _Handler) -> None:
        """A link is over; its outputs were cancelled one by one before."""
        if handler in self._handlers:
            self._handlers.remove(handler)

    def restart_replica(self, rank: int) -> None:
        """Its ranks die: its outputs fail with GROUP_LOST, then it is up again, empty."""
        self.stop_replica(rank)
        self.replicas[rank] = _Replica(self._new_cache(rank))
        self._announce(rank)
        for handler in self._handlers:
            handler.snapshot(rank)

    def stop_replica(self, rank: int) -> None:
        """Its ranks die and don't come back."""
        replica = self.replicas[rank]
        replica.state = DOWN
        for run in list(replica.runs):
            run.handler.session.fail(run.submit.entry_id, GroupLost("a rank died"))
        replica.runs.clear()
        self._announce(rank)

    def drain_replica(self, rank: int) -> None:
        """It takes nothing new."""
        self.replicas[rank].state = DRAINING
        self._announce(rank)

    def evict(self, rank: int, keys: Sequence[int]) -> None:
        """Remove keys from a cache, children first."""
        self._publish(self.replicas[rank].cache.remove(keys))

    def warm(self, rank: int, prompt: Iterable[int], *, salt: str = "") -> list[int]:
        """Put a prompt's blocks into a cache; return their keys."""
        keys = self._keys(pack_ids(prompt), "", salt)
        event = self.replicas[rank].cache.store(keys)
        if event:
            self._publish(event)
        return keys

    def prove(self) -> None:
        """Send loads and digests now, as every heartbeat does."""
        for handler in self._handlers:
            if not self.silent_load:
                handler.session.send(AttachResponse(loads=[self._load(handler)]), Lane.CONTROL)
            if not self.silent_feed:
                digests = [replica.cache.digest() for replica in self.replicas]
                handler.session.send(AttachResponse(digests=digests), Lane.FEED)

    def take(self, handler: _Handler, submit: Submit) -> None:
        """A request came."""
        self.submits.append(submit)
        rank, number = submit.dp_rank, submit.entry_id
        handler.seen[rank] = number

        def on_cancel(error: MeshError) -> None:
            self.cancelled[number] = error
            self._drop(handler, number)

        if not handler.session.open(number, on_cancel, remaining_ms=submit.remaining_ms):
            return
        if self.deaf:
            return
        error = self._refusal(submit)
        if error is not None:
            handler.session.fail(number, error)
            return
        prompt = list(unpack_ids(submit.prompt_ids))
        ids = oracle_output(prompt, self.shape.ordinary, submit.sampling.max_tokens)
        run = _Run(
            handler=handler,
            submit=submit,
            ids=ids,
            position=len(submit.output_ids) // 4,
            keys=self._keys(submit.prompt_ids, submit.adapter, submit.cache_salt),
        )
        self.replicas[rank].runs.append(run)
        accepted = AttachResponse(accepted=[Accepted(entry_ids=[number])])
        handler.session.send(accepted, Lane.CONTROL)
        if not self.paused:
            self._begin(rank, run)
            self._work.set()

    def step(self) -> int:
        """Every output gets its next id; return how many did. For use while `paused`."""
        made = 0
        for rank, replica in enumerate(self.replicas):
            for run in list(replica.runs):
                self._begin(rank, run)
                self._one_id(rank, run)
                made += 1
        return made

    def _refusal(self, submit: Submit) -> MeshError | None:
        if self.refuse:
            return self.refuse.pop(0)
        if submit.fingerprint and submit.fingerprint != self.shape.fingerprint:
            return TokenizerMismatch("another tokenizer")
        state = self.replicas[submit.dp_rank].state
        return None if state == UP else Draining("this replica takes nothing new")

    def _begin(self, rank: int, run: _Run) -> None:
        """Its prefill: say what was cached, and cache the prompt."""
        if run.submit.entry_id in run.handler.started:
            return
        run.handler.started.add(run.submit.entry_id)
        cache = self.replicas[rank].cache
        cached = cache.matched(run.keys) * self.shape.block_tokens
        started = Started(entry_id=run.submit.entry_id, cached_tokens=cached)
        run.handler.session.send(AttachResponse(started=[started]), Lane.CONTROL)
        event = cache.store(run.keys)
        if event:
            self._publish(event)

    def _one_id(self, rank: int, run: _Run) -> None:
        sampling, position = run.submit.sampling, run.position
        number = run.ids[position]
        run.position += 1
        finish = 0
        if number in sampling.stop_token_ids and run.position >= max(1, sampling.min_tokens):
            finish = STOP_TOKEN
        elif run.position >= sampling.max_tokens:
            finish = LENGTH
        step = Step(
            dp_rank=rank,
            incarnation=self.replicas[rank].cache.incarnation,
            entry_ids=[run.submit.entry_id],
            positions=[position],
            counts=[1],
            finishes=[finish],  # type: ignore[list-item]
            token_ids=pack_ids([number]),
            logprobs=[-0.5] if sampling.logprobs else [],
        )
        if finish:
            self._drop(run.handler, run.submit.entry_id)
            run.handler.session.close(run.submit.entry_id)
        frame = AttachResponse(steps=[step], loads=[self._load(run.handler)])
        run.handler.session.send(frame, Lane.CONTROL)

    def _drop(self, handler: _Handler, number: int) -> None:
        for replica in self.replicas:
            replica.runs = [
                run
                for run in replica.runs
                if run.handler is not handler or run.submit.entry_id != number
            ]

    async def _run(self) -> None:
        """Generate while there is work; prove at every tick."""
        loop = asyncio.get_running_loop()
        proven_at = loop.time()
        while True:
            idle = self.paused or not self.running
            if idle:
                self._work.clear()
                try:
                    async with asyncio.timeout(self.shape.tick_s):
                        await self._work.wait()
                except TimeoutError:
                    pass
            else:
                self.step()
                await asyncio.sleep(self.shape.step_s)
            if loop.time() - proven_at >= self.shape.tick_s:
                proven_at = loop.time()
                self.prove()

    def _publish(self, event: feed_pb2.CacheEvent) -> None:
        if not self.lose_events and not self.silent_feed:
            for handler in self._handlers:
                handler.session.send(AttachResponse(events=[event]), Lane.FEED)

    def _announce(self, rank: int) -> None:
        for handler in self._handlers:
            handler.session.send(AttachResponse(statuses=[self.status(rank)]), Lane.CONTROL)

    def _keys(self, ids: bytes, adapter: str, salt: str) -> list[int]:
        shape = self.shape
        namespace = Namespace(
            model=shape.model,
            weight_version=shape.weight_version,
            fingerprint=shape.fingerprint,
            adapter=adapter,
            cache_salt=salt,
        )
        return block_keys(ids, block_tokens=shape.block_tokens, seed=namespace.seed())

    @staticmethod
    def _new_cache(rank: int) -> FakeCache:
        return FakeCache(rank, next(_incarnations))

    def status(self, rank: int) -> feed_pb2.ReplicaStatus:
        """What is announced of a replica."""
        replica = self.replicas[rank]
        return feed_pb2.ReplicaStatus(
            dp_rank=rank,
            incarnation=replica.cache.incarnation,
            state=replica.state,  # type: ignore[arg-type]
        )

    def info(self) -> feed_pb2.GroupInfo:
        """What is said of the group."""
        shape = self.shape
        return feed_pb2.GroupInfo(
            model=shape.model,
            weight_version=shape.weight_version,
            fingerprint=shape.fingerprint,
            block_tokens=shape.block_tokens,
            topology=feed_pb2.Topology(dp=shape.dp, pp=1, tp=1),
            limits=feed_pb2.Limits(
                max_model_len=shape.max_model_len,
                max_running=shape.max_running,
                max_waiting=1024,
                max_batched_tokens=2048,
                kv_blocks=shape.kv_blocks,
                vocab_size=shape.vocab_size,
                eos_token_ids=[2],
            ),
            engine="fake",
        )

    def _load(self, handler: _Handler) -> feed_pb2.Load:
        load = feed_pb2.Load()
        for rank, replica in enumerate(self.replicas):
            started = [run for run in replica.runs if run.submit.entry_id in run.handler.started]
            waiting = [run for run in replica.runs if run not in started]
            load.dp_ranks.append(rank)
            load.incarnations.append(replica.cache.incarnation)
            load.running_counts.append(len(started))
            load.waiting_counts.append(len(waiting))
            load.uncached_token_counts.append(
                sum(len(run.submit.prompt_ids) // 4 for run in waiting)
            )
            load.free_block_counts.append(self.shape.kv_blocks)
            load.prefill_rates.append(0.0)
            load.decode_step_seconds.append(0.0)
            load.seen_entry_ids.append(handler.seen.get(rank, 0))
        return load
