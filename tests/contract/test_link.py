"""Links over a real channel: requests, failures, cancels, deadlines."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import pytest

from radixmesh.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    LinkLost,
    LinkOverloaded,
    QueueFull,
)
from radixmesh.rpc.link import Lane
from radixmesh.rpc.status import to_failure
from radixmesh.tokenizer.v1.tokenizer_service_pb2 import (
    AttachRequest,
    AttachResponse,
    TokenizeEntry,
    TokenizeResult,
)
from tests.fakes.echo_link import (
    FAST,
    Answer,
    EchoHandler,
    EchoLink,
    EchoListener,
    EchoService,
    ask,
    dial,
    serve_echo,
    until,
)


@dataclass
class Pair:
    """A link that is up, and both its ends."""

    service: EchoService
    link: EchoLink
    listener: EchoListener

    @property
    def handler(self) -> EchoHandler:
        return self.service.handlers[-1]


@pytest.fixture
async def pair() -> AsyncGenerator[Pair, None]:
    service = EchoService()
    async with (
        serve_echo(service) as server,
        dial(f"127.0.0.1:{server.port}") as (link, listener),
    ):
        yield Pair(service, link, listener)


def entry(number: int, text: str) -> TokenizeEntry:
    item = TokenizeEntry(entry_id=number)
    item.prompt.text = text
    return item


async def test_many_requests_share_one_link_and_each_gets_its_own_answer(pair: Pair) -> None:
    answers = [ask(pair.link, f"text {n}") for n in range(500)]
    texts = await asyncio.gather(*(answer.get() for answer in answers))
    assert texts == [f"text {n}".encode() for n in range(500)]
    assert not pair.link.entries
    assert pair.handler.session.entry_count == 0


async def test_what_waits_together_travels_in_few_frames(pair: Pair) -> None:
    before = pair.handler.frames
    answers = [ask(pair.link, f"text {n}") for n in range(500)]
    await asyncio.gather(*(answer.get() for answer in answers))
    assert pair.handler.frames - before < 10


async def test_the_first_frame_brings_what_the_service_said_on_accept(pair: Pair) -> None:
    await ask(pair.link, "x").get()
    assert pair.listener.infos == 1
    assert pair.listener.ups[0][0].name == "tokenizer"
    assert pair.handler.session.peer.name == "router"


async def test_a_failure_is_typed_and_ends_its_entry_alone(pair: Pair) -> None:
    failing, fine = ask(pair.link, "fail QUEUE_FULL"), ask(pair.link, "fine")
    error = await failing.error()
    assert type(error) is QueueFull
    assert (error.field, error.metadata) == ("prompt", {"limit": "7"})
    assert error.retry_after_s == 1.0
    assert await fine.get() == b"fine"
    assert pair.link.connected


async def test_entry_numbers_rise_over_reconnects() -> None:
    service = EchoService()
    async with serve_echo(service) as server, dial(f"127.0.0.1:{server.port}") as (link, listener):
        await asyncio.gather(*(ask(link, "x").get() for _ in range(3)))
        service.handlers[-1].session.end(LinkLost("for a test"))
        await listener.down.wait()
        await listener.up.wait()
        await ask(link, "x").get()
        assert service.handlers[-1].opened == [4]


async def test_a_cancel_storm_leaves_no_entry_and_no_task(pair: Pair) -> None:
    before = asyncio.all_tasks()
    for n in range(1000):
        ask(pair.link, "hold", timeout_s=60)
        if n % 7 == 0:
            await asyncio.sleep(0)
    await until(lambda: pair.handler.session.entry_count > 0)
    for number in list(pair.link.entries):
        pair.link.cancel(number)
    assert await ask(pair.link, "after the storm").get() == b"after the storm"
    assert not pair.link.entries
    assert pair.handler.session.entry_count == 0
    assert set(pair.handler.cancelled) == set(pair.handler.opened) - {1001}
    assert all(isinstance(error, Cancelled) for error in pair.handler.cancelled.values())
    assert asyncio.all_tasks() <= before


async def test_a_cancel_before_anything_was_sent_tells_the_peer_nothing(pair: Pair) -> None:
    ask(pair.link, "hold")
    pair.link.cancel(1)
    await ask(pair.link, "next").get()
    assert pair.handler.opened == [2]
    assert not pair.handler.cancels_heard


async def test_a_cancel_never_overtakes_a_submit_that_is_half_sent(pair: Pair) -> None:
    big = "hold" + "x" * 3_000_000
    ask(pair.link, big)
    started = pair.link.pending_bytes
    await until(lambda: pair.link.pending_bytes < started)
    pair.link.cancel(1)
    await until(lambda: bool(pair.handler.cancelled))
    assert pair.handler.opened == [1]
    assert pair.handler.session.entry_count == 0


async def test_a_cancel_never_overtakes_a_submit_that_was_sent_without_a_tag(pair: Pair) -> None:
    numbers = [pair.link.open(Answer()) for _ in range(2)]
    frame = AttachRequest(tokenize=[entry(number, "hold") for number in numbers])
    pair.link.send(frame, Lane.WORK)
    pair.link.cancel(numbers[0])
    await until(lambda: bool(pair.handler.cancelled))
    assert pair.handler.opened == numbers
    assert list(pair.handler.cancelled) == numbers[:1]


async def test_cancelling_twice_or_after_the_end_does_nothing(pair: Pair) -> None:
    answer = ask(pair.link, "x")
    await answer.get()
    for _ in range(2):
        pair.link.cancel(1)
    pair.link.cancel(99)
    await ask(pair.link, "y").get()
    assert answer.failures == 0
    assert not pair.handler.cancelled


async def test_items_for_an_entry_that_is_not_open_are_ignored(pair: Pair) -> None:
    pair.handler.result(77, b"nobody asked")
    await ask(pair.link, "x").get()
    assert pair.listener.stray == 1
    assert pair.link.connected


async def test_a_passed_deadline_fails_the_entry_and_frees_it_at_the_service(pair: Pair) -> None:
    answer = ask(pair.link, "hold", timeout_s=0.05, tell=False)
    assert type(await answer.error()) is DeadlineExceeded
    assert answer.failures == 1
    await until(lambda: bool(pair.handler.cancelled))
    assert isinstance(pair.handler.cancelled[1], Cancelled)
    assert pair.handler.session.entry_count == 0


async def test_the_service_ends_an_entry_whose_time_is_up_by_itself(pair: Pair) -> None:
    answer = Answer()
    number = pair.link.open(answer)
    item = entry(number, "hold")
    item.remaining_ms = 30
    pair.link.send(AttachRequest(tokenize=[item]), Lane.WORK, entry_id=number)
    assert type(await answer.error()) is DeadlineExceeded
    assert isinstance(pair.handler.cancelled[1], DeadlineExceeded)
    assert pair.handler.session.entry_count == 0


async def test_an_answer_in_time_disarms_the_deadline(pair: Pair) -> None:
    answer = ask(pair.link, "quick", timeout_s=0.05)
    assert await answer.get() == b"quick"
    later = ask(pair.link, "hold", timeout_s=0.1)
    await later.error()
    assert answer.failures == 0


async def test_a_duplicate_entry_leaves_the_first_one_alone(pair: Pair) -> None:
    answer = Answer()
    number = pair.link.open(answer)
    for text in ("hold", "fail QUEUE_FULL"):
        pair.link.send(AttachRequest(tokenize=[entry(number, text)]), Lane.WORK)
    await ask(pair.link, "after").get()
    assert pair.handler.duplicates == [number]
    assert not answer.done()
    assert pair.handler.session.entry_count == 1
    pair.link.cancel(number)
    await until(lambda: bool(pair.handler.cancelled))
    assert pair.handler.session.entry_count == 0


async def test_an_entry_and_its_cancel_in_one_frame_leave_nothing_open(pair: Pair) -> None:
    number = pair.link.open(Answer())
    frame = AttachRequest(tokenize=[entry(number, "hold")])
    frame.link.cancels.append(number)
    pair.link.send(frame, Lane.WORK)
    await ask(pair.link, "after").get()
    assert pair.handler.opened == [number, number + 1]
    assert list(pair.handler.cancelled) == [number]
    assert pair.handler.session.entry_count == 0


async def test_last_items_and_a_failure_in_one_frame_arrive_in_that_order(pair: Pair) -> None:
    answer = ask(pair.link, "hold")
    await until(lambda: bool(pair.handler.opened))
    frame = AttachResponse(results=[TokenizeResult(entry_id=1, token_ids=b"last")])
    frame.link.failures.append(to_failure(1, QueueFull("too late")))
    pair.handler.session.send(frame, Lane.CONTROL)
    assert await answer.get() == b"last"
    assert answer.failures == 0


async def test_entries_that_ended_leave_no_timer_behind(pair: Pair) -> None:
    before = live_timers()
    answers = [ask(pair.link, f"text {n}", timeout_s=600) for n in range(300)]
    await asyncio.gather(*(answer.get() for answer in answers))
    held = [ask(pair.link, "hold", timeout_s=600) for _ in range(300)]
    await until(lambda: pair.handler.session.entry_count == 300)
    assert live_timers() >= before + 600
    for number in list(pair.link.entries):
        pair.link.cancel(number)
    await until(lambda: pair.handler.session.entry_count == 0)
    # Give or take the pings of both ends.
    assert live_timers() <= before + 2
    assert not any(answer.done() for answer in held)


def live_timers() -> int:
    scheduled: list[asyncio.TimerHandle] = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    return sum(not timer.cancelled() for timer in scheduled)


@pytest.mark.parametrize("size", [65_000, 65_536, 70_000, 1_000_000])
async def test_an_answer_of_any_size_arrives_whole(pair: Pair, size: int) -> None:
    assert await ask(pair.link, f"size {size}").get() == b"x" * size


async def test_a_request_of_any_size_arrives_whole(pair: Pair) -> None:
    text = "".join(chr(97 + n % 26) for n in range(1_000_000))
    assert await ask(pair.link, text).get() == text.encode()


async def test_small_requests_get_past_a_large_one(pair: Pair) -> None:
    large = ask(pair.link, "x" * 8_000_000)
    started = pair.link.pending_bytes
    await until(lambda: pair.link.pending_bytes < started)
    number = pair.link.open(small := Answer())
    frame = AttachRequest(tokenize=[entry(number, "small")])
    pair.link.send(frame, Lane.CONTROL, entry_id=number)
    await small.get()
    assert not large.done()
    assert len(await large.get()) == 8_000_000


async def test_an_item_larger_than_a_link_carries_is_refused_at_once(pair: Pair) -> None:
    number = pair.link.open(Answer())
    with pytest.raises(InvalidRequest, match="too large"):
        pair.link.send(
            AttachRequest(tokenize=[entry(number, "x" * (FAST.max_item_bytes + 1))]), Lane.WORK
        )
    assert pair.link.connected


async def test_a_full_link_refuses_more_and_says_so(pair: Pair) -> None:
    size = 8_000_000
    for _ in range(FAST.max_pending_bytes // size):
        ask(pair.link, "hold" + "x" * size)
    with pytest.raises(LinkOverloaded):
        ask(pair.link, "hold" + "x" * size)
    assert pair.link.pending_bytes <= FAST.max_pending_bytes
    assert pair.link.pending_bytes > FAST.max_pending_bytes - size - 1000


async def test_a_raising_handler_ends_only_its_own_link(pair: Pair) -> None:
    address = pair.link.address
    async with dial(address) as (other, other_listener):
        held = ask(other, "hold")
        failed = ask(pair.link, "boom")
        error = await failed.error()
        assert isinstance(error, LinkLost)
        assert "secret" not in error.message
        assert "internal error, id" in error.message
        assert not held.done()
        assert not other_listener.downs
        await pair.listener.up.wait()
        assert await ask(pair.link, "again").get() == b"again"


async def test_a_raising_cancel_callback_ends_only_its_own_link(pair: Pair) -> None:
    ask(pair.link, "hold, raise on cancel")
    held = ask(pair.link, "hold")
    await until(lambda: pair.handler.session.entry_count == 2)
    first = pair.handler
    pair.link.cancel(1)
    assert isinstance(await held.error(), LinkLost)
    assert isinstance(first.cancelled[2], LinkLost)
    await pair.listener.up.wait()


async def test_a_raising_sink_ends_only_its_own_link(pair: Pair) -> None:
    class Raising(Answer):
        def on_answer(self, data: bytes) -> None:
            raise RuntimeError("secret of the sink")

    held = ask(pair.link, "hold")
    number = pair.link.open(Raising())
    pair.link.send(AttachRequest(tokenize=[entry(number, "x")]), Lane.WORK)
    error = await held.error()
    assert isinstance(error, LinkLost)
    assert held.failures == 1
    await pair.listener.up.wait()
    assert await ask(pair.link, "again").get() == b"again"


async def test_a_sink_that_raises_when_failed_does_not_keep_others_from_hearing(
    pair: Pair,
) -> None:
    class Raising(Answer):
        def on_failed(self, error: Exception) -> None:
            raise RuntimeError("secret of the sink")

    pair.link.open(Raising())
    held = ask(pair.link, "hold")
    await until(lambda: pair.handler.session.entry_count == 1)
    pair.handler.session.end(LinkLost("for a test"))
    assert isinstance(await held.error(), LinkLost)
    await pair.listener.down.wait()


async def test_nothing_can_be_opened_or_sent_on_a_link_that_is_down() -> None:
    async with dial("127.0.0.1:1", wait=False) as (link, _):
        with pytest.raises(LinkLost):
            link.open(Answer())
        with pytest.raises(LinkLost):
            link.send(AttachRequest(), Lane.WORK)
        assert link.pending_bytes == 0
        assert link.close(1) is None
        link.cancel(1)


async def test_an_idle_link_sends_a_ping_a_heartbeat_and_no_more(pair: Pair) -> None:
    await until(lambda: pair.handler.frames > 1)
    before, began = pair.handler.frames, time.monotonic()
    await until(lambda: pair.handler.frames >= before + 3)
    # The heartbeat before may have come late.
    assert time.monotonic() - began > 1.9 * FAST.heartbeat_s
    assert pair.link.connected
    assert not pair.listener.downs


async def test_the_owner_that_ends_a_link_fails_its_entries_and_ends_the_session() -> None:
    service = EchoService()
    async with serve_echo(service) as server:
        async with dial(f"127.0.0.1:{server.port}") as (link, listener):
            held = ask(link, "hold")
            await until(lambda: bool(service.handlers[0].opened))
        assert isinstance(await held.error(), LinkLost)
        assert len(listener.downs) == 1
        await asyncio.wait_for(service.handlers[0].closed.wait(), 5)
        assert isinstance(service.handlers[0].cancelled[1], LinkLost)
