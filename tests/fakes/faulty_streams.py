"""Many streams at once through a router, each of them checked id by id against the oracle.

Knows the router's gRPC API and the fake engine's definition; nothing of what is broken
meanwhile. Cheap on purpose: the clients share the cores with the mesh.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from tokenizers import Tokenizer

from radixmesh.common.v1 import generation_pb2
from radixmesh.errors import MeshError
from radixmesh.router.v1 import router_service_pb2 as pb
from radixmesh.router.v1.router_service_pb2_grpc import RouterServiceStub
from radixmesh.rpc.status import from_rpc_error
from tests.fakes.oracle import oracle_output, ordinary_ids

# Ids after which a stream counts as being in its middle.
MIDWAY_IDS = 5
SHARED_IDS, OWN_IDS = 32, 12
PREFIXES = 16


class Said:
    """What the engine says to a prompt, and prompts."""

    def __init__(self, model_dir: Path) -> None:
        self._ordinary = ordinary_ids(model_dir)
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))

    def prompts(self, seed: int, count: int) -> list[list[int]]:
        """Prompts that nobody else has, of some families with a prefix in common."""
        rng = random.Random(seed)
        shared = [rng.choices(self._ordinary, k=SHARED_IDS) for _ in range(PREFIXES)]
        return [
            [*shared[number % PREFIXES], *rng.choices(self._ordinary, k=OWN_IDS)]
            for number in range(count)
        ]

    def distinct(self, seed: int, count: int, size: int) -> list[list[int]]:
        """Prompts of a size that have nothing in common."""
        rng = random.Random(f"distinct {seed}")
        return [rng.choices(self._ordinary, k=size) for _ in range(count)]

    def ids(self, prompt: Sequence[int], count: int) -> list[int]:
        return oracle_output(prompt, self._ordinary, count)

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


@dataclass(eq=False)
class Stream:
    """One request, and what its client got.

    Attributes:
        tokens: Ids that it asks for; None: as many as all.
        hint: The place it wishes for, group and dp_rank.
        leaves_at: The client leaves after so many ids; None: never.
    """

    prompt: list[int]
    tokens: int | None = None
    hint: tuple[str, int] | None = None
    leaves_at: int | None = None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finishes: list[pb.Finish] = field(default_factory=list)
    error: MeshError | None = None
    left: bool = False
    ended: bool = False

    @property
    def resumed(self) -> bool:
        """Whether it ran at more than one place."""
        return any(finish.receipt.attempts > 1 for finish in self.finishes)

    def faults(self, said: Said, tokens: int) -> str:
        """Say what is wrong with what came; empty when nothing is."""
        tokens = self.tokens or tokens
        # Of one that broke off, some more than what came.
        broke_off = self.error or self.left
        count = min(tokens, len(self.ids) + 8) if broke_off else tokens
        ids, text = said.ids(self.prompt, count), "".join(self.texts)
        if not self.ended:
            return "it never ended"
        if self.ids != ids[: len(self.ids)]:
            return f"ids {self.ids}, expected {ids}"
        if broke_off:
            whole = said.text(ids).startswith(text) and not self.finishes
            return "" if whole else f"{self.error!r} after {text!r} and {self.finishes}"
        reasons = [finish.finish_reason for finish in self.finishes]
        counts = [finish.usage.completion_tokens for finish in self.finishes]
        if reasons != [generation_pb2.FINISH_REASON_LENGTH] or counts != [tokens]:
            return f"it ended by {self.finishes}"
        if len(self.ids) != tokens or text != said.text(ids):
            return f"{len(self.ids)} ids, and {text!r} instead of {said.text(ids)!r}"
        return ""


class Traffic:
    """Streams that run, and how far they are.

    Args:
        said: The truth.
        tokens: Ids of each output.
        timeout_s: Of each stream; one that takes longer ends by DEADLINE_EXCEEDED.
    """

    def __init__(self, said: Said, *, tokens: int, timeout_s: float) -> None:
        self.streams: list[Stream] = []
        self.tokens = tokens
        self._said = said
        self._timeout_s = timeout_s
        self._begun = self._begun_ended = self._ended = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def midway(self) -> int:
        """Streams that have some ids and have not ended."""
        return self._begun - self._begun_ended

    @property
    def ended(self) -> int:
        return self._ended

    @property
    def resumed(self) -> int:
        """Finished streams that ran at more than one place."""
        return sum(stream.resumed for stream in self.streams)

    @property
    def places(self) -> dict[str, int]:
        """Where how many of the finished streams began."""
        receipts = [finish.receipt for stream in self.streams for finish in stream.finishes]
        return dict(sorted(Counter(f"{one.group_id}/{one.dp_rank}" for one in receipts).items()))

    def start(self, stub: RouterServiceStub, streams: Sequence[Stream]) -> None:
        """Send requests at once."""
        self.streams += streams
        for stream in streams:
            task = asyncio.create_task(self._run(stub, stream))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def until(self, ready: Callable[[], bool], within_s: float = 60.0) -> None:
        """Wait until streams are as far as wanted."""
        try:
            async with asyncio.timeout(within_s):
                while not ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{self!r} after {within_s} s") from None

    async def until_all_ended(self) -> None:
        """Wait for every stream; none takes longer than its deadline and some slack."""
        await self.until(lambda: self._ended == len(self.streams), self._timeout_s + 10)

    def stop(self) -> None:
        """End what still runs."""
        for task in self._tasks:
            task.cancel()

    def __repr__(self) -> str:
        return f"<{self.midway} midway, {self._ended} ended, of {len(self.streams)}>"

    def check(self, allowed: Callable[[Stream], bool] = lambda _: False) -> None:
        """Every stream is exact and ended once; an error only where it is allowed."""
        wrong: Counter[str] = Counter()
        for stream in self.streams:
            fault = stream.faults(self._said, self.tokens)
            if not fault and stream.error and not allowed(stream):
                fault = f"{stream.error.reason}: {stream.error.message}"
            wrong[fault] += bool(fault)
        assert not wrong.total(), f"{wrong.total()} of {len(self.streams)}: {wrong.most_common(3)}"

    async def _run(self, stub: RouterServiceStub, stream: Stream) -> None:
        request = pb.GenerateRequest()
        request.token_ids.ids.extend(stream.prompt)
        request.sampling.max_tokens = stream.tokens or self.tokens
        request.sampling.ignore_eos = True
        if stream.hint:
            request.routing.group_id, request.routing.dp_rank = stream.hint
        call = stub.Generate(request, timeout=self._timeout_s)
        try:
            await self._read(call, stream)
        except grpc.aio.AioRpcError as error:
            stream.error = from_rpc_error(error)
        finally:
            call.cancel()
            stream.ended = True
            self._ended += 1
            self._begun_ended += len(stream.ids) >= MIDWAY_IDS
            self._changed.set()

    async def _read(self, call: Any, stream: Stream) -> None:
        while stream.leaves_at is None or len(stream.ids) < stream.leaves_at:
            message = await call.read()
            if message is grpc.aio.EOF:
                return
            self._take(stream, message)
        stream.left = True

    def _take(self, stream: Stream, message: pb.GenerateResponse) -> None:
        if message.HasField("finish"):
            stream.finishes.append(message.finish)
            return
        assert not stream.finishes, "text after the end"
        before = len(stream.ids)
        stream.ids.extend(message.delta.token_ids)
        stream.texts.append(message.delta.text)
        if before < MIDWAY_IDS <= len(stream.ids):
            self._begun += 1
            self._changed.set()


@asynccontextmanager
async def stub_of(address: str) -> AsyncGenerator[RouterServiceStub, None]:
    """A connection of its own to a router, with as small a window as there is."""
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0))
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield RouterServiceStub(channel)
