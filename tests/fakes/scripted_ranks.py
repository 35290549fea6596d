"""Ranks without processes: the far end of a replica's mailbox, driven by the test.

A `ScriptedRanks` says that it is ready, passes the self-test and answers probes by
itself; all else is said by the test. It keeps the digest of what it reported as stored.
"""

import asyncio
import itertools
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from radixmesh.blocks import pack_ids
from worker.group.framing import FrameSplitter, frame
from worker.request import (
    LENGTH,
    Add,
    Answer,
    CacheChange,
    CacheDigest,
    Cancel,
    Failed,
    Flush,
    Inbound,
    LoadReport,
    Outbound,
    Pause,
    Probe,
    PromptScores,
    Ready,
    Started,
    StepOutput,
    Tops,
    Weights,
)

Message = TypeVar("Message", Add, Cancel, Flush, Pause, Probe, Weights)

READY = Ready(
    block_tokens=16, kv_blocks=256, max_model_len=512, vocab_size=1000, eos_ids=(1,), startup_s=0.0
)


@dataclass(frozen=True)
class Row:
    """New ids of one request."""

    request_id: int
    position: int
    ids: Sequence[int]
    finish: int = 0


class ScriptedRanks:
    """One incarnation of one replica."""

    def __init__(
        self, incarnation: int, *, ready: Ready | None = READY, passes_test: bool = True
    ) -> None:
        self.incarnation = incarnation
        self.mailbox, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self.passes_test = passes_test
        self.answers_probes = True
        self.probed = asyncio.Event()
        self.dumps = 0
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._splitter = FrameSplitter()
        self._decoder: msgspec.msgpack.Decoder[Inbound] = msgspec.msgpack.Decoder(Inbound)
        self._arrived: list[Inbound] = []
        self._steps = itertools.count()
        self._keys: set[int] = set()
        self.under_test = asyncio.Event()
        self.last_request_id = 0
        self.ended = asyncio.Event()
        self._died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._theirs, self._on_readable)
        self._news = asyncio.Event()
        if ready is not None:
            self.send(ready)

    async def first_end(self) -> str:
        return await asyncio.shield(self._died)

    async def died(self) -> bool:
        return self._died.done()

    def dump(self) -> None:
        self.dumps += 1

    async def end(self, grace_s: float) -> None:
        await self.may_end.wait()
        self._close()
        self.ended.set()

    def die(self, how: str = "rank dp=0 was killed by SIGKILL") -> None:
        """End as a killed process does: the socket closes and the exit is seen."""
        self._close()
        self._died.set_result(how)

    def send(self, message: Outbound) -> None:
        self.send_raw(frame(msgspec.msgpack.encode(message)))

    def send_raw(self, data: bytes) -> None:
        """Send bytes, whatever they mean; they must fit the socket's buffer."""
        self._theirs.sendall(data)

    def step(
        self,
        rows: Sequence[Row] = (),
        *,
        accepted: Sequence[int] = (),
        started: Sequence[Started] = (),
        failed: Sequence[Failed] = (),
        changes: Sequence[CacheChange] = (),
        answers: Sequence[Answer] = (),
        load: LoadReport | None = None,
        digest: CacheDigest | None = None,
        logprobs: Sequence[float] = (),
        tops: Tops | None = None,
        prompt_scores: Sequence[PromptScores] = (),
    ) -> None:
        """Report a step; load and digest are what they should be unless given."""
        for change in changes:
            if change.cleared:
                self._keys.clear()
            self._keys.update(change.stored)
            self._keys.difference_update(change.removed)
        self.send(
            StepOutput(
                step=next(self._steps),
                accepted=list(accepted),
                started=list(started),
                request_ids=[row.request_id for row in rows],
                positions=[row.position for row in rows],
                counts=[len(row.ids) for row in rows],
                finishes=[row.finish for row in rows],
                token_ids=pack_ids(token for row in rows for token in row.ids),
                logprobs=list(logprobs),
                failed=list(failed),
                changes=list(changes),
                digest=digest or self.digest,
                load=load or self.load(),
                answers=list(answers),
                tops=tops or Tops(),
                prompt_scores=list(prompt_scores),
            )
        )

    def load(self, *, running: int = 0, waiting: int = 0, uncached: int = 0) -> LoadReport:
        return LoadReport(running, waiting, uncached, 200, 1000.0, 0.01, self.last_request_id)

    @property
    def digest(self) -> CacheDigest:
        xor = 0
        for key in self._keys:
            xor ^= key
        return CacheDigest(len(self._keys), xor)

    async def adds(self, count: int) -> list[Add]:
        """Wait for so many requests, in the order of their arrival."""
        return [await self._next(Add) for _ in range(count)]

    async def cancelled(self, count: int) -> list[int]:
        """Wait until so many requests are cancelled."""
        ids: list[int] = []
        while len(ids) < count:
            ids += (await self._next(Cancel)).request_ids
        return ids

    async def flush(self) -> Flush:
        """Wait for an order to empty the cache."""
        return await self._next(Flush)

    async def pause(self) -> Pause:
        """Wait for an order to pause or to go on."""
        return await self._next(Pause)

    async def probe(self) -> Probe:
        """Wait for a probe; only with `answers_probes` false does one come."""
        return await self._next(Probe)

    async def weights(self) -> Weights:
        """Wait for an order to change the weights."""
        return await self._next(Weights)

    async def _next(self, kind: type[Message]) -> Message:
        while True:
            for index, message in enumerate(self._arrived):
                if isinstance(message, kind):
                    del self._arrived[index]
                    return message
            self._news.clear()
            await self._news.wait()

    def _on_readable(self) -> None:
        try:
            data = self._theirs.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close()
            return
        for body in self._splitter.feed(data):
            self._take(self._decoder.decode(body))

    def _take(self, message: Inbound) -> None:
        if isinstance(message, Add):
            self.last_request_id = message.request_id
            if not self.under_test.is_set():
                self.under_test.set()
                self._answer_test(message.request_id)
                return
        if isinstance(message, Probe) and self.answers_probes:
            self.step(answers=[Answer(message.token)])
            self.probed.set()
            return
        self._arrived.append(message)
        self._news.set()

    def _answer_test(self, request_id: int) -> None:
        if self.passes_test:
            self.step([Row(request_id, 0, [7, 8], finish=LENGTH)], accepted=[request_id])

    def _close(self) -> None:
        if self._theirs.fileno() < 0:
            return
        asyncio.get_running_loop().remove_reader(self._theirs)
        self._theirs.close()


class ScriptedLauncher:
    """Starts scripted ranks and remembers them all, by replica."""

    def __init__(self, *, ready: Ready | None = READY, passes_test: bool = True) -> None:
        self.ready = ready
        self.passes_test = passes_test
        self.ranks: dict[int, list[ScriptedRanks]] = {}
        self._news = asyncio.Event()

    async def __call__(self, dp_rank: int, incarnation: int) -> ScriptedRanks:
        ranks = ScriptedRanks(incarnation, ready=self.ready, passes_test=self.passes_test)
        self.ranks.setdefault(dp_rank, []).append(ranks)
        self._news.set()
        return ranks

    async def incarnation(self, dp_rank: int, number: int) -> ScriptedRanks:
        """Wait for the n-th start of a replica, counted from 0."""
        while len(self.ranks.get(dp_rank, ())) <= number:
            self._news.clear()
            await self._news.wait()
        return self.ranks[dp_rank][number]
