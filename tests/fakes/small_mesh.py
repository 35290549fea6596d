"""A mesh without sockets for tests of the pipeline: replicas and text services in memory.

An id is a character. The next id follows from all ids before it, so a lost,
doubled or swapped one changes everything after it. Everything moves only in
`step`, and every booking, entry and text entry that is open can be counted.
"""

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from radixmesh.blocks import pack_ids, unpack_ids
from radixmesh.errors import (
    GroupLost,
    LinkLost,
    MeshError,
    ModelNotServed,
    NoReplicaReady,
    QueueFull,
    ServiceUnavailable,
)
from router.fleet.ask import Ask, ModelInfo, SubmitSpec, WorkerSink
from router.fleet.booking import Booking
from router.fleet.breaker import Outcome
from router.fleet.views import CandidatePrice
from router.fleet.workload import Charge
from router.request import ChatPrompt, FinishReason, TextPrompt
from router.text.detokenizers import DecodeOptions, TextSink
from router.text.pool import Serving
from router.text.tokenizers import Encoded
from router.tree.marks import MarkTable
from tests.fakes.prices import candidate_price

MODEL = ModelInfo(
    name="tiny", max_model_len=512, fingerprint="f", ready_replicas=1, vocab_size=128, eos_ids=(0,)
)
LETTERS = b"abcdefghijklmnopqrstuvwxyz "
BLOCK_TOKENS = 4


def next_id(ids: Sequence[int]) -> int:
    """What the model says after `ids`."""
    return LETTERS[zlib.crc32(bytes(ids)) % len(LETTERS)]


def expected_text(prompt: str, count: int) -> str:
    """What an uninterrupted client gets."""
    ids = list(prompt.encode())
    for _ in range(count):
        ids.append(next_id(ids))
    return bytes(ids[len(prompt) :]).decode()


@dataclass(eq=False)
class WorkerEntry:
    """One output at a replica."""

    fleet: "SmallFleet"
    replica: "Replica"
    booking: Booking
    spec: SubmitSpec
    sink: WorkerSink
    ids: list[int]
    started: bool = False

    def cancel(self) -> None:
        if self in self.replica.entries:
            self.replica.entries.remove(self)
            self.fleet.cancelled += 1
            self.booking.release()

    def step(self) -> None:
        if not self.started:
            self.started = True
            self.sink.on_accepted()
            self.sink.on_started(self.replica.cached_tokens, 0.125)
            return
        position = len(self.ids) - len(self.spec.prompt_ids) // 4
        token = 0 if position == self.fleet.eos_after else next_id(self.ids)
        self.ids.append(token)
        finish = 0
        if token == 0:
            finish = FinishReason.STOP_TOKEN
        elif position + 1 == self.spec.sampling.max_tokens:
            finish = FinishReason.LENGTH
        if finish:
            self.replica.entries.remove(self)
            self.booking.release()
        logprobs = [-float(token)] if self.spec.sampling.logprobs else []
        self.sink.on_tokens(position, pack_ids([token]), logprobs, int(finish))

    def fail(self, error: MeshError) -> None:
        self.replica.entries.remove(self)
        self.booking.release()
        self.sink.on_failed(error)


@dataclass(eq=False)
class Replica:
    """One replica of the fake fleet."""

    group_id: str
    incarnation: int = 1
    up: bool = True
    full: bool = False
    cached_tokens: int = 0
    stalled: bool = False  # takes requests and does nothing
    stepped_at: float = 0.0
    entries: list[WorkerEntry] = field(default_factory=list)


class SmallFleet:
    """Replicas that generate when they are stepped."""

    def __init__(self, size: int = 2) -> None:
        self.replicas = [Replica(f"g{index}") for index in range(size)]
        self.eos_after = -1
        self.served = [MODEL]
        self.booked: set[int] = set()
        self.specs: list[SubmitSpec] = []
        self.asks: list[Ask] = []
        self.sinks: list[WorkerSink] = []
        self.cancelled = 0
        self.predicted_wait_s = 0.25
        self.outcomes: list[tuple[str, Outcome]] = []
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def entries(self) -> list[WorkerEntry]:
        return [entry for replica in self.replicas for entry in replica.entries]

    @property
    def waiting(self) -> int:
        return sum(not waiter.done() for waiter in self._waiters)

    def models(self) -> Sequence[ModelInfo]:
        return self.served

    def limits(self, model: str) -> ModelInfo:
        for info in self.served:
            if model in {info.name, ""}:
                return info
        if not self.served:
            raise NoReplicaReady("no group has said what it serves")
        raise ModelNotServed("no such model")

    def place(self, ask: Ask) -> Booking:
        self.asks.append(ask)
        ready = [one for one in self.replicas if one.up]
        if not ready:
            raise NoReplicaReady("no replica is ready")
        allowed = [one for one in ready if (one.group_id, 0, one.incarnation) not in ask.avoid]
        allowed = allowed or ready
        hinted = [one for one in allowed if one.group_id == ask.hint_group]
        chosen = min(hinted or allowed, key=lambda one: len(one.entries))
        now = asyncio.get_running_loop().time
        sent_at = now()
        booking = Booking(
            group_id=chosen.group_id,
            dp_rank=0,
            incarnation=chosen.incarnation,
            price=candidate_price(
                chosen.group_id,
                block_tokens=BLOCK_TOKENS,
                prompt_blocks=len(ask.ids) // 4 // BLOCK_TOKENS,
                matched_blocks=chosen.cached_tokens // BLOCK_TOKENS,
                wait_s=self.predicted_wait_s,
            ),
            possible_blocks=chosen.cached_tokens // BLOCK_TOKENS,
            policy="price",
            booked_at=0.0,
            charge=Charge(0, 0),
            marks=MarkTable().mark(1, 1, ()),
            on_release=lambda booking: self.booked.discard(id(booking)),
            on_cached=lambda tokens: None,
            on_outcome=lambda outcome: self.outcomes.append((chosen.group_id, outcome)),
            silent_s=lambda: now() - max(sent_at, chosen.stepped_at),
        )
        self.booked.add(id(booking))
        return booking

    async def wait_ready(self, model: str, *, resume: bool = False) -> None:
        if self.served and any(one.up for one in self.replicas):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def submit(self, booking: Booking, spec: SubmitSpec, sink: WorkerSink) -> WorkerEntry:
        self.specs.append(spec)
        self.sinks.append(sink)
        replica = next(one for one in self.replicas if one.group_id == booking.group_id)
        if not replica.up:
            raise LinkLost("the link is down")
        ids = [*unpack_ids(spec.prompt_ids), *unpack_ids(spec.output_ids)]
        entry = WorkerEntry(self, replica, booking, spec, sink, ids)
        replica.entries.append(entry)
        if replica.full:
            asyncio.get_running_loop().call_soon(self._refuse, entry)
        return entry

    def _refuse(self, entry: WorkerEntry) -> None:
        if entry in entry.replica.entries:
            entry.fail(QueueFull("the queue is full"))

    def explain(self, ask: Ask) -> Sequence[CandidatePrice]:
        self.asks.append(ask)
        return []

    def step(self) -> None:
        for entry in self.entries:
            if not entry.replica.full and not entry.replica.stalled:
                entry.replica.stepped_at = asyncio.get_running_loop().time()
                entry.step()

    def kill(self, replica: Replica, error: type[MeshError] = GroupLost) -> None:
        replica.up = False
        for entry in list(replica.entries):
            entry.fail(error("the replica is gone"))

    def revive(self, replica: Replica) -> None:
        replica.up = True
        replica.incarnation += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


@dataclass(eq=False)
class SmallTextEntry:
    """One output at the fake detokenizer; holds back what may become a stop."""

    decoder: "SmallDecoder"
    sink: TextSink
    options: DecodeOptions
    ids: list[int] = field(default_factory=list)
    said: int = 0
    ended: bool = False

    def feed(self, position: int, ids: bytes) -> None:
        if ids and self in self.decoder.entries:
            assert position == len(self.ids), "ids must follow one another"
            self.ids.extend(unpack_ids(ids))

    def end(self) -> None:
        self.ended = True

    def blame(self) -> None:
        self.decoder.blamed += 1

    def cancel(self) -> None:
        self.decoder.entries.discard(self)

    def step(self) -> None:
        text = bytes(self.ids).decode()
        for stop in self.options.stop_strings:
            at = text.find(stop)
            if at >= 0:
                end = at + len(stop)
                keep = end if self.options.include_stop else at
                self._done(text[self.said : keep], stop, end)
                return
        certain = len(text) if self.ended else len(text) - self._held(text)
        if self.ended:
            self._done(text[self.said :], "", len(text))
        elif certain > self.said:
            start, self.said = self.said, certain
            self.sink.on_piece(text[start:certain], certain, self._raws(start, certain))

    def _done(self, tail: str, stop: str, consumed: int) -> None:
        self.decoder.entries.discard(self)
        self.sink.on_done(tail, stop, consumed, self._raws(self.said, consumed))

    def _held(self, text: str) -> int:
        sizes = (
            size
            for stop in self.options.stop_strings
            for size in range(1, len(stop))
            if text.endswith(stop[:size])
        )
        return max(sizes, default=0)

    def _raws(self, start: int, end: int) -> list[bytes]:
        if not self.options.render_tokens:
            return []
        return [bytes([token]) for token in self.ids[start:end]]


class SmallDecoder:
    """One fake detokenizer that can be killed."""

    def __init__(self) -> None:
        self.up = True
        self.paused = False
        self.opened = 0
        self.blamed = 0
        self.options: list[DecodeOptions] = []
        self.entries: set[SmallTextEntry] = set()

    async def open(
        self, sink: TextSink, options: DecodeOptions, wanted: Serving, *, wait_s: float
    ) -> SmallTextEntry:
        if not self.up:
            await asyncio.sleep(wait_s)
            raise ServiceUnavailable("no detokenizer is reachable")
        self.opened += 1
        self.options.append(options)
        entry = SmallTextEntry(self, sink, options)
        self.entries.add(entry)
        return entry

    def step(self) -> None:
        for entry in list(self.entries):
            if not self.paused:
                entry.step()

    def kill(self) -> None:
        entries, self.entries = self.entries, set()
        for entry in entries:
            entry.sink.on_failed(LinkLost("the detokenizer is gone"))


class SmallEncoder:
    """A fake tokenizer: a character is an id. Waits while `held` is set."""

    def __init__(self) -> None:
        self.error: MeshError | None = None
        self.held: asyncio.Event | None = None
        self.timeouts: list[float] = []

    async def encode(
        self, prompt: TextPrompt | ChatPrompt, wanted: Serving, *, timeout_s: float
    ) -> Encoded:
        self.timeouts.append(timeout_s)
        if self.held is not None:
            await self.held.wait()
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        if isinstance(prompt, ChatPrompt):
            text = "".join(turn.content for turn in prompt.messages)
        else:
            text = prompt.text
        return Encoded(pack_ids(list(text.encode())), wanted.fingerprint)
