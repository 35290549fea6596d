"""Lanes: order, priority, bounds, reassembly. Frames are bytes that name their items."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.rpc.lanes import (
    FRAGMENT_HEADER_BYTES,
    ITEM_OVERHEAD_BYTES,
    Lane,
    Outbox,
    Reassembler,
)

MAX = 256
WORK_LANES = (Lane.CONTROL, Lane.WORK)
Piece = tuple[int, bytes, bool]


class Wire:
    """An outbox whose fragments are noted aside, and the far side that rejoins them."""

    def __init__(self) -> None:
        self.pieces: dict[bytes, Piece] = {}
        self.outbox = Outbox(max_frame_bytes=MAX, fragment=self._fragment)
        self.reassembler = Reassembler(1 << 20)
        self.frames: list[bytes] = []
        self.received: list[bytes] = []

    def _fragment(self, number: int, data: bytes, last: bool) -> bytes:
        header = f"#{number}:{last}:{len(self.pieces)}#".encode()
        assert len(header) <= FRAGMENT_HEADER_BYTES
        frame = header + data
        self.pieces[frame] = (number, data, last)
        return frame

    def step(self) -> bool:
        """Move one frame to the far side; False when nothing waits."""
        frame = self.outbox.next_frame()
        if frame is None:
            return False
        self.frames.append(frame)
        piece = self.pieces.get(frame)
        if piece is None:
            self.received.append(frame)
            return True
        whole = self.reassembler.add(piece[0], piece[1], last=piece[2])
        if whole is not None:
            self.received.append(whole)
        return True

    def drain(self) -> bytes:
        while self.step():
            pass
        return b"".join(self.received)


def item(number: int, size: int) -> bytes:
    """An item that can be found again in what arrives."""
    mark = f"<{number}>".encode()
    return mark + b"." * max(0, size - len(mark))


def order(joined: bytes) -> list[int]:
    return [int(part.split(b">")[0]) for part in joined.split(b"<")[1:]]


pushes = st.lists(
    st.tuples(st.sampled_from(Lane), st.integers(1, 4 * MAX), st.integers(0, 3)), max_size=60
)


@given(pushes)
def test_everything_arrives_once_in_order_within_its_lane(
    plan: list[tuple[Lane, int, int]],
) -> None:
    wire = Wire()
    for number, (lane, size, steps) in enumerate(plan):
        wire.outbox.push(item(number, size), lane)
        for _ in range(steps):
            wire.step()
    arrived = wire.drain()
    numbers = order(arrived)
    assert sorted(numbers) == list(range(len(plan)))
    assert len(arrived) == sum(len(item(n, size)) for n, (_, size, _) in enumerate(plan))
    for lane in Lane:
        mine = [n for n in numbers if plan[n][0] == lane]
        assert mine == sorted(mine)
    assert wire.reassembler.held_bytes == 0


@given(pushes)
def test_no_frame_is_larger_than_the_bound_and_none_is_empty(
    plan: list[tuple[Lane, int, int]],
) -> None:
    wire = Wire()
    for number, (lane, size, _) in enumerate(plan):
        wire.outbox.push(item(number, size), lane)
    wire.drain()
    assert all(0 < len(frame) <= MAX for frame in wire.frames)


@given(pushes)
def test_what_waits_together_leaves_by_priority(plan: list[tuple[Lane, int, int]]) -> None:
    wire = Wire()
    for number, (lane, size, _) in enumerate(plan):
        wire.outbox.push(item(number, size), lane)
    lanes = [plan[n][0] for n in order(wire.drain())]
    assert lanes == sorted(lanes)


@given(pushes)
def test_pending_bytes_count_what_waits_and_return_to_zero(
    plan: list[tuple[Lane, int, int]],
) -> None:
    wire = Wire()
    for number, (lane, size, _) in enumerate(plan):
        wire.outbox.push(item(number, size), lane)

    def waiting(lanes: tuple[Lane, ...]) -> int:
        return sum(
            len(item(n, size)) + ITEM_OVERHEAD_BYTES
            for n, (lane, size, _) in enumerate(plan)
            if lane in lanes
        )

    assert wire.outbox.work_bytes == waiting(WORK_LANES)
    assert wire.outbox.feed_bytes == waiting((Lane.FEED,))
    wire.drain()
    assert wire.outbox.work_bytes == wire.outbox.feed_bytes == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(WORK_LANES),
            st.integers(1, 3 * MAX),
            st.one_of(st.none(), st.integers(0, 2)),
            st.integers(0, 3),
        ),
        max_size=40,
    ),
    st.integers(0, 2),
)
def test_word_of_a_withdrawal_comes_after_all_of_the_entry_and_what_is_unsent_stays_here(
    plan: list[tuple[Lane, int, int | None, int]], tag: int
) -> None:
    wire = Wire()
    for number, (lane, size, owner, steps) in enumerate(plan):
        # As a link uses it: one lane per entry.
        wire.outbox.push(item(number, size), lane if owner is None else Lane.WORK, tag=owner)
        for _ in range(steps):
            wire.step()
    lane_of_word = wire.outbox.withdraw(tag)
    word = 999
    if lane_of_word is not None:
        wire.outbox.push(item(word, 8), lane_of_word)
    numbers = order(wire.drain())
    mine = [n for n, (_, _, owner, _) in enumerate(plan) if owner == tag]
    assert wire.outbox.work_bytes == 0
    assert [n for n, p in enumerate(plan) if p[2] != tag] == sorted(
        n for n in numbers if n != word and n not in mine
    )
    if lane_of_word is None:
        assert mine
        assert not set(mine) & set(numbers)
        return
    for number in set(mine) & set(numbers):
        assert numbers.index(number) < numbers.index(word)
    untagged = [n for n, (_, _, owner, _) in enumerate(plan) if owner is None]
    assert all(numbers.index(n) < numbers.index(word) for n in untagged)


def test_an_entry_of_which_nothing_left_needs_no_word() -> None:
    wire = Wire()
    wire.outbox.push(item(1, 50), Lane.WORK, tag=7)
    assert wire.outbox.withdraw(7) is None
    assert wire.outbox.next_frame() is None
    assert wire.outbox.work_bytes == 0


def test_word_of_an_entry_that_left_goes_first() -> None:
    wire = Wire()
    wire.outbox.push(item(1, 50), Lane.WORK, tag=7)
    wire.drain()
    wire.outbox.push(item(2, 50), Lane.WORK, tag=8)
    assert wire.outbox.withdraw(7) is Lane.CONTROL


def test_word_of_an_entry_that_left_in_part_waits_for_the_rest() -> None:
    wire = Wire()
    wire.outbox.push(item(1, 3 * MAX), Lane.WORK, tag=7)
    wire.step()
    assert wire.outbox.withdraw(7) is Lane.WORK
    assert order(wire.drain()) == [1]


def test_control_gets_between_the_pieces_of_a_large_item() -> None:
    wire = Wire()
    wire.outbox.push(item(1, 10 * MAX), Lane.WORK)
    wire.step()
    wire.outbox.push(item(2, 20), Lane.CONTROL)
    assert order(wire.drain()) == [2, 1]


def test_dropping_the_feed_keeps_results_and_the_rest_of_a_piece_that_left() -> None:
    wire = Wire()
    wire.outbox.push(item(1, 3 * MAX), Lane.FEED)
    wire.step()
    for number, lane in enumerate((Lane.FEED, Lane.FEED, Lane.CONTROL, Lane.WORK), start=2):
        wire.outbox.push(item(number, 20), lane)
    assert wire.outbox.drop_feed() == 2
    assert order(wire.drain()) == [4, 5, 1]
    assert wire.outbox.feed_bytes == 0


def test_clearing_forgets_everything() -> None:
    wire = Wire()
    for lane in Lane:
        wire.outbox.push(item(1, 20), lane, tag=3)
    wire.outbox.clear()
    assert wire.outbox.next_frame() is None
    assert wire.outbox.work_bytes == wire.outbox.feed_bytes == 0
    assert wire.outbox.withdraw(3) is Lane.CONTROL


def test_a_frame_bound_without_room_for_a_fragment_is_refused() -> None:
    with pytest.raises(ValueError, match="max_frame_bytes"):
        Outbox(max_frame_bytes=FRAGMENT_HEADER_BYTES, fragment=lambda *_: b"")


@given(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=8), st.randoms())
def test_pieces_of_several_frames_may_interleave(frames: list[bytes], random: object) -> None:
    pieces = [
        [(number, frame[at : at + 7], at + 7 >= len(frame)) for at in range(0, len(frame), 7)]
        for number, frame in enumerate(frames)
    ]
    reassembler = Reassembler(1 << 20)
    whole: dict[int, bytes] = {}
    while any(pieces):
        queue = random.choice([queue for queue in pieces if queue])  # type: ignore[attr-defined]
        number, data, last = queue.pop(0)
        done = reassembler.add(number, data, last=last)
        assert (done is not None) == last
        if done is not None:
            whole[number] = done
    assert [whole[number] for number in range(len(frames))] == frames
    assert reassembler.held_bytes == 0


def test_incomplete_frames_are_bounded_even_when_their_pieces_are_empty() -> None:
    reassembler = Reassembler(10_000)
    for number in range(10_000 // ITEM_OVERHEAD_BYTES):
        reassembler.add(number, b"", last=False)
    with pytest.raises(ValueError, match="incomplete"):
        reassembler.add(10_000, b"", last=False)
