"""The modelled worker by hand: times by its formula, caches by its rules."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.replay.cache import BlockCache, Chain
from bench.replay.clock import Clock
from bench.replay.job import Job
from bench.replay.worker import Entry, Pace, Worker
from router.fleet.changes import Change, Removed, Stored

PACE = Pace(rate=10_000, cache_blocks=4096, block_tokens=64)


def _note(clock: Clock, found: list[float], place: int) -> None:
    found[place] = clock.now


def serve(jobs: Sequence[Job], pace: Pace = PACE) -> list[tuple[float, float]]:
    """Return when each job's first id and its end came."""
    clock = Clock()
    worker = Worker(clock, pace, lambda _: None)
    times = [[0.0, 0.0] for _ in jobs]
    for job, found in zip(jobs, times, strict=True):
        entry = Entry(job, partial(_note, clock, found, 0), partial(_note, clock, found, 1))
        clock.at(job.at, partial(worker.submit, entry))
    clock.run()
    assert worker.cache.available == pace.cache_blocks
    assert worker.loads[-1].uncached == pytest.approx(0)
    return [(first, end) for first, end in times]


def keys_of(start: int, tokens: int) -> range:
    return range(start, start + tokens // 64)


@given(st.integers(1, 20_000), st.integers(1, 50))
def test_one_request_takes_what_the_formula_says(tokens: int, output: int) -> None:
    [(first, end)] = serve([Job(at=1.0, keys=keys_of(1, tokens), tokens=tokens, output=output)])
    whole, rest = divmod(tokens, 512)
    prefill_s = whole * 512 / 10_000 + (max(0.02, rest / 10_000) if rest else 0.0)
    assert first == pytest.approx(1.0 + prefill_s)
    assert end == pytest.approx(first + (output - 1) * (0.02 + 0.00015))


def test_a_repeated_prompt_computes_one_block_at_most() -> None:
    first = Job(at=0.0, keys=keys_of(1, 6400), tokens=6400)
    again = Job(at=9.0, keys=keys_of(1, 6400), tokens=6400)
    (one, _), (two, _) = serve([first, again])
    assert one == pytest.approx(12 * 0.0512 + max(0.02, 256 / 10_000))
    assert two - 9.0 == pytest.approx(0.02)


def test_siblings_wait_for_the_first_of_them() -> None:
    jobs = [Job(at=0.0, keys=(*range(1, 81), 1000 + n), tokens=81 * 64 + 5) for n in range(4)]
    times = [first for first, _ in serve(jobs)]
    alone = serve(jobs[:1])[0][0]
    assert max(times) < 1.5 * alone


def test_a_newcomer_joins_at_the_next_step_while_others_decode() -> None:
    long = Job(at=0.0, keys=(), tokens=10, output=1000)
    late = Job(at=5.003, keys=(), tokens=20)
    _, (first, _) = serve([long, late])
    step_s = 0.02 + 0.00015
    assert 5.003 + step_s <= first <= 5.003 + 2 * step_s + 1e-9


def test_decoding_takes_a_part_of_the_steps() -> None:
    """A prefill next to 256 decoding requests has half of the budget."""
    busy = [Job(at=0.0, keys=(), tokens=1, output=5000) for _ in range(256)]
    late = Job(at=20.0, keys=(), tokens=5120)
    pace = Pace(rate=10_000, cache_blocks=100_000, block_tokens=64, max_running=300)
    first = serve([*busy, late], pace)[-1][0]
    step_s = 256 / 10_000 + 256 * 0.00015
    assert first - 20.0 == pytest.approx(20 * step_s, abs=0.1)


def test_the_prefill_only_model_is_a_queue_of_whole_prompts() -> None:
    jobs = [Job(at=0.1 * n, keys=(), tokens=3000, output=500) for n in range(5)]
    pace = Pace(rate=10_000, cache_blocks=4096, block_tokens=64, serial=True)
    assert [first for first, _ in serve(jobs, pace)] == pytest.approx(
        [0.3 * (n + 1) for n in range(5)]
    )


class Fed:
    """What a follower of the changes knows."""

    def __init__(self) -> None:
        self.parents: dict[int, int] = {}

    def hear(self, change: Change) -> None:
        if isinstance(change, Stored):
            parent = change.parent
            assert not parent or parent in self.parents
            for key in change.keys:
                assert key not in self.parents
                self.parents[key] = parent
                parent = key
        elif isinstance(change, Removed):
            for key in change.keys:
                assert key not in self.parents.values(), "a block left before its child"
                del self.parents[key]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.booleans()), max_size=60))
def test_a_cache_keeps_its_bounds_and_says_all_that_changes(
    turns: list[tuple[int, int, bool]],
) -> None:
    fed = Fed()
    cache = BlockCache(20, fed.hear)
    open_chains: list[Chain] = []
    for family, length, close in turns:
        if close and open_chains:
            cache.close(open_chains.pop(0))
            continue
        shared = length // 2
        keys = [100 * family + 10 + n for n in range(shared)]
        keys += [1000 + 100 * family + 10 * length + n for n in range(length - shared)]
        chain = cache.open(keys, length, length)
        if chain is not None:
            cache.store(chain, length)
            open_chains.append(chain)
            assert cache.depth(keys, length) == length
        assert len(cache) <= 20
        assert 0 <= cache.available <= 20
        assert dict(cache.pairs()) == fed.parents
    for chain in open_chains:
        cache.close(chain)
    assert cache.available == 20


def test_the_oldest_leaf_goes_first_and_what_is_in_use_never() -> None:
    cache = BlockCache(6, lambda _: None)
    for keys in ([1, 2, 3], [4, 5]):
        chain = cache.open(keys, 3, len(keys))
        assert chain is not None
        cache.store(chain, len(keys))
        cache.close(chain)
    used = cache.open([1, 2], 2, 2)
    assert used is not None
    new = cache.open([7, 8, 9, 10], 4, 4)
    assert new is not None
    assert dict(cache.pairs()) == {1: 0, 2: 1}
    assert cache.open([11], 1, 1) is None
    cache.close(used)
    assert cache.open([11], 1, 1) is not None
    assert dict(cache.pairs()) == {1: 0}
