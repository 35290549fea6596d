"""The detokenizer over a real channel: columns in, pieces out, stops, replay, limits."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from radixmesh.detokenizer.v1 import detokenizer_service_pb2 as pb
from radixmesh.detokenizer.v1.detokenizer_service_pb2_grpc import DetokenizerServiceStub
from radixmesh.models import tokenizer_fingerprint
from radixmesh.rpc.link import Identity, LinkLimits, Session
from radixmesh.rpc.server import Server
from radixmesh.rpc.status import from_rpc_error
from radixmesh.telemetry.metrics import TextMetrics
from tests.fakes.model_dir import EOS_ID, VOCAB_SIZE
from tests.fakes.text_router import (
    DetokenizerRouter,
    add_tokens,
    app,
    channel_to,
    detokenizer_router,
)
from tests.fakes.tokenizers import byte_ids
from tokenizer_svc.app import serve_detokenizer
from tokenizer_svc.detokenize.service import (
    SERVICE_NAME,
    DetokenizeLink,
    DetokenizerParts,
    DetokenizerServicer,
)
from tokenizer_svc.settings import DetokenizerSettings
from tokenizer_svc.vocab import Vocab

if TYPE_CHECKING:  # a name of the stub files alone
    from radixmesh.detokenizer.v1.detokenizer_service_pb2_grpc import DetokenizerServiceAsyncStub


class Watched(DetokenizerServicer):
    """A servicer whose links can be looked into."""

    def __init__(self, vocab: Vocab, outputs_limit: int) -> None:
        self.metrics = TextMetrics(CollectorRegistry(), "detokenizer")
        parts = DetokenizerParts(
            model="tiny", vocab=vocab, metrics=self.metrics, outputs_limit=outputs_limit
        )
        super().__init__(parts, Identity("detokenizer", "test"), LinkLimits())
        self.links: list[DetokenizeLink] = []

    def _accept(self, session: Session[pb.AttachResponse]) -> DetokenizeLink:
        self.links.append(super()._accept(session))
        return self.links[-1]

    def counted(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"radixmesh_detokenizer_{name}", labels)


class Bench:
    """A detokenizer with one attached router."""

    def __init__(self, service: Watched, router: DetokenizerRouter, port: int) -> None:
        self.service = service
        self.router = router
        self.port = port

    def open(self, frame: pb.AttachRequest, **options: Any) -> int:
        """Begin an output in a frame."""
        entry_id = self.router.open()
        frame.opens.add(entry_id=entry_id, options=pb.DecodeOptions(**options))
        return entry_id

    def pieces(self, entry_id: int) -> list[pb.Piece]:
        found = [piece for frame in self.router.frames for piece in frame.pieces]
        return [piece for piece in found if piece.entry_id == entry_id]

    def dones(self, entry_id: int) -> list[pb.Done]:
        found = [done for frame in self.router.frames for done in frame.dones]
        return [done for done in found if done.entry_id == entry_id]

    def text(self, entry_id: int) -> str:
        tails = [done.tail for done in self.dones(entry_id)]
        return "".join([*(piece.text for piece in self.pieces(entry_id)), *tails])

    async def done(self, *entry_ids: int) -> list[pb.Done]:
        """Wait for the end of outputs."""
        await self.router.until(lambda: all(map(self.dones, entry_ids)))
        return [self.dones(entry_id)[0] for entry_id in entry_ids]

    async def failed(self, entry_id: int) -> str:
        """Wait for the failure of an output; returns its reason."""
        await self.router.until(lambda: self.router.error(entry_id) is not None)
        error = self.router.error(entry_id)
        return error.reason if error else ""

    async def settled(self) -> None:
        """Wait until the service has read all that was sent."""
        frame = pb.AttachRequest()
        last = self.open(frame)
        frame.ends.append(last)
        self.router.send(frame)
        await self.done(last)


@asynccontextmanager
async def detokenizer(model_dir: Path, outputs_limit: int = 5000) -> AsyncGenerator[Bench]:
    service = Watched(Vocab.load(model_dir), outputs_limit)
    server = Server("127.0.0.1:0", [(SERVICE_NAME, service.add_to)])
    port = await server.start()
    try:
        async with detokenizer_router(port) as router:
            yield Bench(service, router, port)
    finally:
        await server.stop()


@pytest.fixture
async def bench(model_dir: Path) -> AsyncGenerator[Bench]:
    async with detokenizer(model_dir) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


async def test_the_first_frame_describes_the_detokenizer(bench: Bench, model_dir: Path) -> None:
    fingerprint = tokenizer_fingerprint(model_dir)
    assert bench.router.frames[0].info == pb.DetokenizerInfo(model="tiny", fingerprint=fingerprint)


async def test_an_output_may_begin_run_and_end_in_one_frame(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    frame = pb.AttachRequest()
    entry = bench.open(frame)
    ids = tokenizer.encode("naïve 世界 👩‍👩‍👧").ids
    add_tokens(frame, (entry, 0, ids))
    frame.ends.append(entry)
    bench.router.send(frame)
    (done,) = await bench.done(entry)
    assert bench.text(entry) == "naïve 世界 👩‍👩‍👧"
    assert (done.consumed_ids, done.stop_matched) == (len(ids), "")


async def test_one_frame_of_many_outputs_is_answered_by_one_frame(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    opening = pb.AttachRequest()
    entries = [bench.open(opening) for _ in range(256)]
    bench.router.send(opening)
    await bench.settled()
    before = len(bench.router.frames)
    word, *_ = tokenizer.encode("fox").ids
    bench.router.send(add_tokens(pb.AttachRequest(), *((entry, 0, [word]) for entry in entries)))
    await bench.router.until(lambda: bool(bench.pieces(entries[-1])))
    answers = [frame for frame in bench.router.frames[before:] if frame.pieces]
    assert [len(frame.pieces) for frame in answers] == [256]


async def test_ids_that_come_one_by_one_give_the_text_as_it_becomes_certain(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    frame = pb.AttachRequest()
    entry = bench.open(frame)
    bench.router.send(frame)
    for position, token_id in enumerate(byte_ids(tokenizer, "a世😀".encode()[:-1])):
        bench.router.send(add_tokens(pb.AttachRequest(), (entry, position, [token_id])))
    end = pb.AttachRequest(ends=[entry])
    bench.router.send(end)
    (done,) = await bench.done(entry)
    assert [(piece.text, piece.consumed_ids) for piece in bench.pieces(entry)] == [
        ("a", 1),
        ("世", 4),
    ]
    assert (done.tail, done.consumed_ids) == ("\ufffd", 7)


async def test_a_stop_ends_the_output_at_once_and_later_ids_are_ignored(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    """P36: stops are matched here, whoever computes the ids; B29."""
    frame = pb.AttachRequest()
    entry = bench.open(frame, stop_strings=["own fox"])
    ids = tokenizer.encode("The quick brown fox jumps").ids
    bench.router.send(add_tokens(frame, *((entry, place, [i]) for place, i in enumerate(ids))))
    bench.router.send(pb.AttachRequest(ends=[entry]))
    (done,) = await bench.done(entry)
    await bench.settled()
    assert len(bench.dones(entry)) == 1
    assert bench.text(entry) == "The quick br"
    assert done.stop_matched == "own fox"
    assert tokenizer.decode(ids[: done.consumed_ids]).endswith("own fox")
    assert bench.router.error(entry) is None


async def test_the_stop_may_be_kept_and_early_matches_ignored(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    letters = byte_ids(tokenizer, b"a.b.c.")
    frame = pb.AttachRequest()
    entry = bench.open(frame, stop_strings=["."], include_stop=True, min_tokens=3)
    bench.router.send(add_tokens(frame, (entry, 0, letters)))
    (done,) = await bench.done(entry)
    assert bench.text(entry) == "a.b."
    assert (done.stop_matched, done.consumed_ids) == (".", 4)


async def test_special_ids_are_left_out_or_kept(bench: Bench, tokenizer: Tokenizer) -> None:
    frame = pb.AttachRequest()
    ids = [*tokenizer.encode("fox").ids, EOS_ID]
    entries = [bench.open(frame), bench.open(frame, keep_special_tokens=True)]
    add_tokens(frame, *((entry, 0, ids) for entry in entries))
    frame.ends.extend(entries)
    bench.router.send(frame)
    dones = await bench.done(*entries)
    assert [bench.text(entry) for entry in entries] == ["fox", "fox</s>"]
    assert [done.consumed_ids for done in dones] == [len(ids)] * 2


async def test_single_ids_are_rendered_with_the_text_they_belong_to(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    frame = pb.AttachRequest()
    entry = bench.open(frame, render_tokens=True, stop_strings=["世x"])
    add_tokens(frame, (entry, 0, byte_ids(tokenizer, "a世".encode())))
    bench.router.send(frame)
    await bench.settled()
    assert [list(piece.token_bytes) for piece in bench.pieces(entry)] == [[b"a"]]
    bench.router.send(pb.AttachRequest(ends=[entry]))
    (done,) = await bench.done(entry)
    assert list(done.token_bytes) == [b"\xe4", b"\xb8", b"\x96"]
    assert done.tail == "世"


@pytest.mark.parametrize(
    ("position", "ids", "reason"),
    [
        (1, [5], "INVALID_REQUEST"),
        (0, [VOCAB_SIZE], "UNKNOWN_TOKEN"),
        (0, [2**32 - 1], "UNKNOWN_TOKEN"),
    ],
)
async def test_a_gap_or_an_unknown_id_fails_its_output_alone(
    bench: Bench, tokenizer: Tokenizer, position: int, ids: Sequence[int], reason: str
) -> None:
    """B57, P36: the error is surfaced, the neighbours go on."""
    frame = pb.AttachRequest()
    bad, good = bench.open(frame), bench.open(frame)
    fox = tokenizer.encode("fox").ids
    add_tokens(frame, (bad, position, ids), (good, 0, fox))
    frame.ends.extend([bad, good])
    bench.router.send(frame)
    await bench.done(good)
    assert await bench.failed(bad) == reason
    assert bench.text(good) == "fox"
    assert bench.dones(bad) == []


@pytest.mark.parametrize(
    "stops", [["x"] * 65, ["x" * 4097], [""]], ids=["too many", "too long", "empty"]
)
async def test_stops_beyond_the_limits_fail_their_output_alone(
    bench: Bench, stops: list[str]
) -> None:
    frame = pb.AttachRequest()
    bad = bench.open(frame, stop_strings=stops)
    good = bench.open(frame)
    frame.ends.append(good)
    bench.router.send(frame)
    assert await bench.failed(bad) == "INVALID_REQUEST"
    await bench.done(good)


async def test_columns_that_do_not_fit_fail_the_outputs_they_name(bench: Bench) -> None:
    frame = pb.AttachRequest()
    named, other = bench.open(frame), bench.open(frame)
    frame.tokens.add(entry_ids=[named], positions=[0], counts=[2], token_ids=b"\0\0\0\0")
    frame.ends.append(other)
    bench.router.send(frame)
    assert await bench.failed(named) == "INVALID_REQUEST"
    await bench.done(other)


async def test_items_for_unknown_outputs_are_ignored(bench: Bench) -> None:
    frame = add_tokens(pb.AttachRequest(), (123_456, 0, [5]))
    frame.ends.append(123_457)
    bench.router.send(frame)
    await bench.settled()
    assert bench.router.link.connected


async def test_a_second_open_of_the_same_number_leaves_the_first_alone(
    bench: Bench, tokenizer: Tokenizer
) -> None:
    frame = pb.AttachRequest()
    entry = bench.open(frame)
    frame.opens.add(entry_id=entry, options=pb.DecodeOptions(stop_strings=["o"]))
    add_tokens(frame, (entry, 0, tokenizer.encode("fox").ids))
    frame.ends.append(entry)
    bench.router.send(frame)
    await bench.done(entry)
    assert bench.text(entry) == "fox"


async def test_a_thousand_cancelled_outputs_leave_no_state(bench: Bench) -> None:
    frame = pb.AttachRequest()
    entries = [bench.open(frame, stop_strings=["stop"]) for _ in range(1000)]
    add_tokens(frame, *((entry, 0, [5, 6]) for entry in entries))
    bench.router.send(frame)
    await bench.settled()
    (link,) = bench.service.links
    assert link.open_count == 1000
    assert bench.service.counted("entries_in_flight_count") == 1000
    for entry in entries:
        bench.router.link.cancel(entry)
    await bench.settled()
    assert link.open_count == 0
    assert bench.service.counted("entries_in_flight_count") == 0
    assert bench.service.counted("entries_total", outcome="cancelled") == 1000


async def test_the_end_of_a_link_drops_its_outputs(bench: Bench) -> None:
    async with detokenizer_router(bench.port) as second:
        entry = second.open()
        frame = pb.AttachRequest()
        frame.opens.add(entry_id=entry)
        second.send(frame)
        second.send(add_tokens(pb.AttachRequest(), (entry, 0, [5])))
        await second.until(lambda: any(frame.pieces for frame in second.frames))
        link = bench.service.links[-1]
        assert link.open_count == 1
    async with asyncio.timeout(10):
        while bench.service.counted("links_count") != 1:
            await bench.settled()
    assert link.open_count == 0
    assert bench.service.counted("entries_in_flight_count") == 0


async def test_more_outputs_than_the_limit_are_refused(model_dir: Path) -> None:
    async with detokenizer(model_dir, outputs_limit=1) as bench:
        frame = pb.AttachRequest()
        first, second = bench.open(frame), bench.open(frame)
        bench.router.send(frame)
        assert await bench.failed(second) == "QUEUE_FULL"
        bench.router.send(pb.AttachRequest(ends=[first]))
        await bench.done(first)


async def test_a_replay_on_another_instance_says_the_same(
    bench: Bench, tokenizer: Tokenizer, model_dir: Path
) -> None:
    ids = tokenizer.encode("The quick 世界 brown fox jumps over the lazy dog").ids
    said = []
    async with detokenizer(model_dir) as other:
        for place, instance in enumerate((bench, other)):
            frame = pb.AttachRequest()
            entry = instance.open(frame, stop_strings=["lazy"])
            chunks = [ids] if place else [[token_id] for token_id in ids]
            position = 0
            for chunk in chunks:
                add_tokens(frame, (entry, position, chunk))
                position += len(chunk)
            instance.router.send(frame)
            (done,) = await instance.done(entry)
            said.append((instance.text(entry), done.stop_matched, done.consumed_ids))
    assert said[0] == said[1]
    assert said[0][:2] == ("The quick 世界 brown fox jumps over the ", "lazy")


@pytest.fixture
async def stub(bench: Bench) -> AsyncGenerator["DetokenizerServiceAsyncStub"]:
    async with channel_to(bench.port) as channel:
        yield DetokenizerServiceStub(channel)


async def test_decode_gives_the_text_of_a_whole_output(
    stub: "DetokenizerServiceAsyncStub", tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode("The quick brown fox").ids
    whole = await stub.Decode(pb.DecodeRequest(token_ids=ids))
    assert whole == pb.DecodeResponse(text="The quick brown fox", consumed_ids=len(ids))
    options = pb.DecodeOptions(stop_strings=["own"])
    stopped = await stub.Decode(pb.DecodeRequest(token_ids=ids, options=options))
    assert (stopped.text, stopped.stop_matched) == ("The quick br", "own")


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.DecodeRequest(token_ids=[VOCAB_SIZE]), "UNKNOWN_TOKEN"),
        (pb.DecodeRequest(options=pb.DecodeOptions(stop_strings=[""])), "INVALID_REQUEST"),
    ],
)
async def test_decode_refuses_with_typed_errors(
    stub: "DetokenizerServiceAsyncStub", request_: pb.DecodeRequest, reason: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Decode(request_)
    assert from_rpc_error(caught.value).reason == reason


async def test_the_app_serves_until_it_is_stopped(model_dir: Path) -> None:
    settings = DetokenizerSettings(model=str(model_dir), port=0)

    def serve(stop: asyncio.Event, on_ready: Any) -> Coroutine[Any, Any, None]:
        return serve_detokenizer(settings, stop, on_ready=on_ready)

    async with app(serve) as port, channel_to(port) as channel:
        asked = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
        answer = await health_pb2_grpc.HealthStub(channel).Check(asked)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with detokenizer_router(port) as router:
            assert router.frames[0].info.model == model_dir.name
