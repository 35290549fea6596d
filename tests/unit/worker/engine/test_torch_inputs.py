"""Plans become flat batches: positions, slots, masks and groups.

Run: pytest tests/unit/worker/engine/test_torch_inputs.py
"""

from array import array

import torch

from worker.engine.engine import Row
from worker.engine.inputs import Batch, make_batch
from worker.request import Sampling


def row(start: int, count: int, blocks: list[int], *, sampled: bool = True) -> Row:
    return Row(1, array("I", range(count)), start, blocks, sampled, 0, Sampling(seed=0))


def batch(*rows: Row) -> Batch:
    return make_batch(rows, block_tokens=4, dtype=torch.float32, device=torch.device("cpu"))


def test_rows_lie_one_after_the_other_without_padding() -> None:
    made = batch(row(0, 3, [9]), row(6, 1, [5, 2]), row(3, 2, [7, 1]))
    assert made.ids.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert made.positions.tolist() == [[0, 1, 2, 6, 3, 4]]
    assert made.slots.tolist() == [36, 37, 38, 10, 31, 4]
    assert [(part.begin, part.end) for part in made.prefill] == [(0, 3), (4, 6)]


def test_only_the_last_id_of_a_row_that_draws_is_kept() -> None:
    made = batch(row(0, 3, [0]), row(0, 2, [1], sampled=False), row(5, 1, [2, 3]))
    assert made.keep.tolist() == [2, 5]


def test_ids_before_those_that_are_scored_are_kept_after_all_that_draw() -> None:
    scored, late = row(0, 3, [0]), row(2, 2, [1], sampled=False)
    scored.targets = array("I", [7, 8])
    late.targets = array("I", [9])
    made = batch(scored, late, row(5, 1, [2, 3]))
    assert made.keep.tolist() == [2, 5, 0, 1, 3]


def test_a_prefill_from_the_start_needs_neither_pool_nor_mask() -> None:
    (part,) = batch(row(0, 3, [0])).prefill
    assert part.blocks is None
    assert part.mask is None


def test_a_later_chunk_sees_everything_before_and_nothing_after_each_id() -> None:
    (part,) = batch(row(3, 2, [7, 1, 8])).prefill
    assert part.blocks is not None
    assert part.mask is not None
    assert part.blocks.tolist() == [[7, 1]]
    assert (part.mask == 0).tolist() == [[True] * 4 + [False], [True] * 5]


def test_single_ids_are_padded_to_the_longest_of_their_group() -> None:
    (group,) = batch(row(4, 1, [3, 1]), row(9, 1, [6, 5, 4, 99])).decode
    assert group.rows.tolist() == [1, 0]
    assert group.blocks.tolist() == [[6, 5, 4], [3, 1, 3]]
    assert (group.mask[:, 0, 0] == 0).sum(-1).tolist() == [10, 5]


def test_a_long_sequence_does_not_make_short_ones_read_as_much() -> None:
    lengths = [400, 3, 390, 20, 17, 1]
    made = batch(*(row(length - 1, 1, list(range(100))) for length in lengths))
    assert sorted(index for group in made.decode for index in group.rows.tolist()) == list(range(6))
    read = sum(group.blocks.numel() for group in made.decode)
    assert read <= 2 * sum(-(-length // 4) for length in lengths)
