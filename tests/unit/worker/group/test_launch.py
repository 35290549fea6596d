"""What a starter and the fork server say to each other, and which descriptors go with it."""

import msgspec
import pytest

from worker.config import FakeConfig, RankConfig
from worker.group.launch import (
    Start,
    decode_order,
    descriptors,
    needs_meeting,
    with_descriptors,
)

CONFIG = RankConfig(
    model_dir="/models/a b'\"\n",
    engine="fake",
    tp=3,
    fake=FakeConfig(eos_after=3, faults=("exit@step=20", "hang@step=1:tp=1")),
    mailbox_fd=5,
    broadcast_fds=(7, 9),
    store_fd=8,
)


def test_an_order_carries_the_whole_configuration() -> None:
    order = Start(3, CONFIG)
    assert decode_order(msgspec.json.encode(order)) == order


def test_nonsense_is_no_order() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_order(b"{}")


def test_descriptors_keep_their_meaning_under_other_numbers() -> None:
    assert descriptors(CONFIG) == [5, 7, 9, 8]
    moved = with_descriptors(CONFIG, [11, 12, 13, 14])
    assert (moved.mailbox_fd, moved.broadcast_fds) == (11, (12, 13))
    assert (moved.tensor_fd, moved.store_fd) == (-1, 14)
    assert with_descriptors(moved, [5, 7, 9, 8]) == CONFIG


@pytest.mark.parametrize("count", [3, 5])
def test_descriptors_that_were_lost_on_the_way_are_noticed(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} descriptors came for 4"):
        with_descriptors(CONFIG, range(20, 20 + count))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"engine": "fake", "tp": 2, "pp": 2, "tensors": "gloo"}, False),
        ({"engine": "fake", "tp": 2, "carrier": "gloo"}, True),
        ({"engine": "torch", "tensors": "gloo"}, False),
        ({"engine": "torch", "tp": 2, "tensors": "shm"}, True),
        ({"engine": "torch", "pp": 2}, True),
    ],
)
def test_ranks_meet_only_where_something_may_go_by_gloo(
    values: dict[str, object], expected: bool
) -> None:
    config = msgspec.structs.replace(RankConfig(model_dir=""), **values)
    assert needs_meeting(config) == expected
