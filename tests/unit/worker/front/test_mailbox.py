"""The front's end of the socket: whole messages in order, bounds, and death told once."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec
import pytest

from radixmesh.errors import GroupLost, QueueFull
from worker.front.mailbox import Mailbox
from worker.group.framing import FrameSplitter, frame
from worker.request import Broken, Cancel, Flush, Outbound, Ready

READY = Ready(
    block_tokens=16, kv_blocks=9, max_model_len=64, vocab_size=50, eos_ids=(1,), startup_s=0.5
)


@dataclass
class Ends:
    """Both ends of a socket: the front's mailbox, and the bare one of the rank."""

    mailbox: Mailbox
    theirs: socket.socket
    arrived: "asyncio.Queue[Outbound]"
    lost: list[str] = field(default_factory=list)
    dead: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
async def ends() -> AsyncGenerator[Ends, None]:
    ours, theirs = socket.socketpair()
    arrived: asyncio.Queue[Outbound] = asyncio.Queue()

    def on_lost(reason: str) -> None:
        made.lost.append(reason)
        made.dead.set()

    mailbox = Mailbox(arrived.put_nowait, on_lost, max_pending_bytes=1 << 16)
    made = Ends(mailbox, theirs, arrived)
    await mailbox.connect(ours)
    yield made
    mailbox.close()
    theirs.close()


async def test_messages_arrive_whole_whatever_the_pieces(ends: Ends) -> None:
    messages = [READY, Broken("INTERNAL", "x" * 1000), READY]
    raw = b"".join(frame(msgspec.msgpack.encode(message)) for message in messages)
    for start in range(0, len(raw), 7):
        ends.theirs.sendall(raw[start : start + 7])
    assert [await ends.arrived.get() for _ in messages] == messages


async def test_what_is_sent_can_be_read(ends: Ends) -> None:
    ends.mailbox.send(Flush(7))
    ends.mailbox.send(Cancel([1, 2]))
    bodies = FrameSplitter().feed(await asyncio.to_thread(ends.theirs.recv, 1 << 16))
    assert [msgspec.msgpack.decode(body, type=Flush | Cancel) for body in bodies] == [
        Flush(7),
        Cancel([1, 2]),
    ]


async def test_a_rank_that_does_not_read_gets_no_more_work_but_still_cancels(ends: Ends) -> None:
    def overfill() -> None:
        for _ in range(10_000):
            ends.mailbox.send(Flush(2**60))
            ends.mailbox.send(Cancel(list(range(1_000))))

    with pytest.raises(QueueFull):
        overfill()
    ends.mailbox.send(Cancel([1]))


async def test_death_is_told_once_and_after_the_last_message(ends: Ends) -> None:
    ends.theirs.sendall(frame(msgspec.msgpack.encode(READY)))
    ends.theirs.close()
    await ends.dead.wait()
    assert ends.arrived.get_nowait() == READY
    assert ends.lost == ["the rank closed its socket"]
    with pytest.raises(GroupLost):
        ends.mailbox.send(Flush(1))


@pytest.mark.parametrize("raw", [frame(b"\xc1"), b"\xff\xff\xff\xff"])
async def test_what_can_t_be_read_ends_the_connection_with_a_reason(ends: Ends, raw: bytes) -> None:
    ends.theirs.sendall(raw)
    await ends.dead.wait()
    assert ends.lost[0].startswith("the rank sent what can't be read")


async def test_a_closed_mailbox_is_silent(ends: Ends) -> None:
    ends.mailbox.close()
    assert await asyncio.to_thread(ends.theirs.recv, 1) == b""
    assert ends.arrived.empty()
    assert ends.lost == []
