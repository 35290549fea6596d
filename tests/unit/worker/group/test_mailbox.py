"""Rank (0, 0)'s mailbox: order, the front's death, and large writes that meet large writes."""

import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from tests.fakes.rank_threads import FrontEnd
from tests.fakes.replica import add
from worker.group.framing import FramingError
from worker.group.mailbox import FrontGone, Mailbox
from worker.request import Broken, Cancel, Flush, Inbound

Ends = tuple[Mailbox, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    front, rank = socket.socketpair()
    mailbox = Mailbox(rank)
    yield mailbox, front
    mailbox.close()
    front.close()


def test_messages_come_in_order_and_whole(ends: Ends) -> None:
    mailbox, front = ends
    sent: list[Inbound] = [add(1, [3, 4]), Cancel([1, 2]), Flush(token=5)]
    FrontEnd(front).send(*sent)
    assert mailbox.take(wait=False) == sent
    assert mailbox.take(wait=False) == []


def test_waiting_ends_with_the_first_message(ends: Ends) -> None:
    mailbox, front = ends
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.extend(mailbox.take(wait=True)))
    reader.start()
    FrontEnd(front).send(Cancel([7]))
    reader.join(10)
    assert got == [Cancel([7])]


def test_the_front_s_end_is_an_end_while_waiting_and_while_not(ends: Ends) -> None:
    mailbox, front = ends
    front.close()
    with pytest.raises(FrontGone):
        mailbox.take(wait=True)
    with pytest.raises(FrontGone):
        mailbox.take(wait=False)
    with pytest.raises(FrontGone):
        mailbox.send(Broken("INTERNAL", "x" * (1 << 20)))


def test_both_ends_may_write_more_than_the_sockets_hold(ends: Ends) -> None:
    mailbox, front = ends
    prompt = [9] * 500_000
    written = threading.Thread(
        target=lambda: FrontEnd(front).send(add(1, prompt), add(2, prompt), Cancel([1]))
    )
    large = Broken("INTERNAL", "x" * (8 << 20))
    sender = threading.Thread(target=mailbox.send, args=(large,))
    written.start()
    sender.start()
    written.join(10)
    assert not written.is_alive()
    assert FrontEnd(front).receive() == large
    sender.join(10)
    got: list[Inbound] = []
    while len(got) < 3:
        got += mailbox.take(wait=True)
    assert [type(one).__name__ for one in got] == ["Add", "Add", "Cancel"]


def test_what_is_no_message_is_refused(ends: Ends) -> None:
    mailbox, front = ends
    front.sendall(b"\x01\x00\x00\x00\xc0")
    with pytest.raises(msgspec.ValidationError):
        mailbox.take(wait=False)
    front.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(FramingError):
        mailbox.take(wait=False)
