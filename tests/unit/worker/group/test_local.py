"""The local carrier: frames in order, and a typed end when the other side is gone or silent."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from worker.group.carrier import PeerLost
from worker.group.framing import HEADER, MAX_BODY_BYTES, FrameSplitter, FramingError, frame
from worker.group.local import LocalLeaf, LocalRoot


@pytest.fixture
def pair() -> Iterator[tuple[LocalRoot, LocalLeaf]]:
    one, other = socket.socketpair()
    root, leaf = LocalRoot([one], stage_size=2, deadline_s=0.2), LocalLeaf(other)
    yield root, leaf
    root.close()
    leaf.close()


def test_a_first_word_a_record_and_a_mark_go_across(pair: tuple[LocalRoot, LocalLeaf]) -> None:
    root, leaf = pair
    leaf.hello(b"word")
    assert root.hellos() == [b"word"]
    root.broadcast(b"record")
    assert leaf.receive() == b"record"
    leaf.mark(2**64 - 1)
    assert root.marks([1]) == [2**64 - 1]


def test_a_record_larger_than_any_socket_buffer_arrives_whole() -> None:
    one, other = socket.socketpair()
    root, leaf = LocalRoot([one]), LocalLeaf(other)
    record = bytes(range(256)) * (1 << 14)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(leaf.receive()))
    reader.start()
    root.broadcast(record)
    reader.join(10)
    assert got == [record]
    root.close()
    leaf.close()


def test_a_lone_rank_broadcasts_to_nobody() -> None:
    root = LocalRoot([])
    root.broadcast(b"record")
    assert root.hellos() == []
    assert root.marks([]) == []


def test_marks_of_a_rank_that_is_asked_later_wait_in_order() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    root = LocalRoot([one for one, _ in pairs])
    leaves = [LocalLeaf(other) for _, other in pairs]
    for value in range(3):
        for number, leaf in enumerate(leaves, 1):
            leaf.mark(10 * number + value)
        assert root.marks([1]) == [10 + value]
    assert [root.marks([2]) for _ in range(3)] == [[20], [21], [22]]
    root.close()
    for leaf in leaves:
        leaf.close()


def test_a_silent_rank_is_lost_after_the_deadline(pair: tuple[LocalRoot, LocalLeaf]) -> None:
    root, _ = pair
    root.broadcast(b"record")
    with pytest.raises(PeerLost, match="rank 1 gave no answer"):
        root.marks([1])


def test_a_rank_that_reads_nothing_is_lost_after_the_deadline(
    pair: tuple[LocalRoot, LocalLeaf],
) -> None:
    root, _ = pair
    with pytest.raises(PeerLost, match="takes no more"):
        root.broadcast(bytes(8 << 20))


@pytest.fixture
def narrow() -> Iterator[tuple[socket.socket, LocalLeaf]]:
    """A way on which only a part of `RECORD` has room, and the rank that would read it."""
    one, other = socket.socketpair()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    leaf = LocalLeaf(other)
    yield one, leaf
    one.close()
    leaf.close()


RECORD = bytes(64 << 10)


def test_a_later_stage_may_compute_longer_than_a_peer_may_be_silent_before_it_reads(
    narrow: tuple[socket.socket, LocalLeaf],
) -> None:
    one, leaf = narrow
    root = LocalRoot([one], stage_size=1, deadline_s=0.2, step_deadline_s=20)
    got: list[bytes] = []
    # Its step: the passing of time is what is measured here.
    reader = threading.Timer(0.7, lambda: got.append(leaf.receive()))
    reader.start()
    began = time.monotonic()
    root.broadcast(RECORD)
    assert time.monotonic() - began > 0.4, "the record had room, so nothing was tested"
    reader.join(10)
    assert got == [RECORD]


def test_a_later_stage_that_reads_nothing_for_as_long_as_a_step_may_take_is_lost(
    narrow: tuple[socket.socket, LocalLeaf],
) -> None:
    one, _ = narrow
    root = LocalRoot([one], stage_size=1, deadline_s=20, step_deadline_s=0.2)
    with pytest.raises(PeerLost, match="rank 1 takes no more"):
        root.broadcast(RECORD)


def test_a_dead_rank_is_noticed_at_once(pair: tuple[LocalRoot, LocalLeaf]) -> None:
    root, leaf = pair
    leaf.close()
    with pytest.raises(PeerLost, match="is gone"):
        root.broadcast(b"record")
    with pytest.raises(PeerLost, match="is gone"):
        root.marks([1])


def test_the_end_of_rank_0_ends_the_others(pair: tuple[LocalRoot, LocalLeaf]) -> None:
    root, leaf = pair
    root.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        leaf.receive()


def test_half_a_record_and_then_the_end_is_an_end() -> None:
    one, other = socket.socketpair()
    leaf = LocalLeaf(other)
    one.sendall(frame(b"record")[:-2])
    one.close()
    with pytest.raises(PeerLost):
        leaf.receive()
    leaf.close()


def test_a_length_that_cannot_be_is_refused() -> None:
    one, other = socket.socketpair()
    leaf = LocalLeaf(other)
    one.sendall(HEADER.pack(MAX_BODY_BYTES + 1))
    with pytest.raises(FramingError):
        leaf.receive()
    one.close()
    leaf.close()


def test_the_splitter_finds_bodies_in_any_pieces() -> None:
    bodies = [b"", b"a", b"bc" * 500]
    stream = b"".join(frame(body) for body in bodies)
    splitter = FrameSplitter()
    found = [body for at in range(len(stream)) for body in splitter.feed(stream[at : at + 1])]
    assert found == bodies
    assert FrameSplitter().feed(stream) == bodies


def test_the_splitter_refuses_a_length_that_cannot_be() -> None:
    with pytest.raises(FramingError):
        FrameSplitter().feed(HEADER.pack(MAX_BODY_BYTES + 1))
    with pytest.raises(FramingError):
        frame(bytes(MAX_BODY_BYTES + 1))
