"""Whatever mix of requests a replica gets, its outputs are the oracle's and nothing is lost.

`FakeReplica.turn` checks the account of all blocks, the feed and the digest after
every step; these tests bring the mixes.
"""

from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.oracle import oracle_output
from tests.fakes.replica import ORDINARY, FakeReplica, add
from worker.request import LENGTH, Add, Cancel, Flush, Inbound, Pause, Sampling

PROMPTS = st.lists(st.sampled_from((3, 4)), min_size=1, max_size=14)


@dataclass(frozen=True)
class Wanted:
    """One request of a mix."""

    prompt: list[int]
    journal: int
    max_tokens: int
    salt: str
    priority: int
    arrives: int
    cancelled: int | None
    scored: bool
    top_logprobs: int
    expected: list[int] = field(default_factory=list)


@st.composite
def wanted(draw: st.DrawFn) -> Wanted:
    prompt = draw(PROMPTS)
    max_tokens = draw(st.integers(1, 10))
    return Wanted(
        prompt=prompt,
        journal=draw(st.integers(0, max_tokens)),
        max_tokens=max_tokens,
        salt=draw(st.sampled_from(("", "other"))),
        priority=draw(st.integers(-1, 1)),
        arrives=draw(st.integers(0, 12)),
        cancelled=draw(st.none() | st.integers(0, 20)),
        scored=draw(st.booleans()),
        top_logprobs=draw(st.integers(0, 2)),
        expected=oracle_output(prompt, ORDINARY, max_tokens),
    )


MIXES = st.lists(wanted(), min_size=1, max_size=10)
# One step at a time; two that overlap; and micro-batches of two and of four stages.
PACES = st.sampled_from(((1, False), (2, True), (2, False), (4, False)))
FLUSHES = st.sets(st.integers(0, 20), max_size=3)


def inputs_of(mix: list[Wanted], flushes: set[int], step: int) -> list[Inbound]:
    inputs: list[Inbound] = []
    for number, one in enumerate(mix, 1):
        if one.arrives == step:
            sampling = Sampling(
                seed=1,
                max_tokens=one.max_tokens,
                ignore_eos=True,
                top_logprobs=one.top_logprobs,
                prompt_logprobs=one.scored,
            )
            request = add(
                number,
                one.prompt,
                output=one.expected[: one.journal],
                sampling=sampling,
                salt=one.salt,
                priority=one.priority,
            )
            inputs.append(request)
        if one.cancelled == step:
            inputs.append(Cancel([number]))
    if step in flushes:
        inputs.append(Flush(token=step))
    return inputs


@settings(max_examples=100, deadline=None)
@given(
    mix=MIXES,
    flushes=FLUSHES,
    block_tokens=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    max_running=st.integers(1, 5),
    budget=st.integers(5, 20),
    pace=PACES,
    prefix_first=st.booleans(),
)
def test_every_mix_generates_the_oracle_s_ids_and_ends_each_request_once(
    mix: list[Wanted],
    flushes: set[int],
    block_tokens: int,
    spare_blocks: int,
    max_running: int,
    budget: int,
    pace: tuple[int, bool],
    prefix_first: bool,
) -> None:
    replica = FakeReplica(
        depth=pace[0],
        futures=pace[1],
        prefix_first=prefix_first,
        ageing_us=5,
        block_tokens=block_tokens,
        kv_blocks=-(-24 // block_tokens) + spare_blocks,
        max_model_len=24,
        max_running=max_running,
        max_batched_tokens=budget,
    )
    for step in range(22):
        replica.turn(*inputs_of(mix, flushes, step), now_us=step)
        assert replica.load.running <= max_running
        assert sum(len(row.ids) for row in replica.plans[-1].rows) <= budget
    replica.finish()
    assert replica.failed == {}
    for number, one in enumerate(mix, 1):
        given_ids = replica.outputs.get(number, [])
        assert given_ids == one.expected[one.journal :][: len(given_ids)]
        if one.cancelled is None or one.cancelled < one.arrives:
            assert replica.starts[number] == one.journal
            assert given_ids == one.expected[one.journal :]
            assert replica.finishes[number] == LENGTH
            assert replica.ends[number] == 1
            tell = one.scored and not one.journal
            scores = [-float(target) for target in one.prompt[1:]] if tell else []
            assert replica.prompt_scores.get(number, []) == scores
            tops = [[token, 0][: one.top_logprobs] for token in given_ids if one.top_logprobs]
            assert [best for best in replica.tops.get(number, []) if best] == tops
        assert replica.ends[number] <= 1
    assert replica.load.free_blocks == replica.cache.total
    assert (replica.load.running, replica.load.waiting, replica.load.uncached_tokens) == (0, 0, 0)


@settings(max_examples=50, deadline=None)
@given(
    mix=MIXES,
    stops=st.lists(st.sets(st.sampled_from(ORDINARY), max_size=12), min_size=10, max_size=10),
    flushes=FLUSHES,
    pauses=st.dictionaries(st.integers(0, 20), st.booleans(), max_size=4),
    spare_blocks=st.integers(0, 6),
)
def test_every_depth_gives_each_request_the_same_ids_and_the_same_end(
    mix: list[Wanted],
    stops: list[set[int]],
    flushes: set[int],
    pauses: dict[int, bool],
    spare_blocks: int,
) -> None:
    ends = []
    for depth, futures in ((1, False), (2, True), (2, False), (4, False)):
        replica = FakeReplica(
            kv_blocks=6 + spare_blocks,
            max_model_len=24,
            max_running=4,
            max_batched_tokens=9,
            depth=depth,
            futures=futures,
        )
        for step in range(22):
            inputs = [
                msgspec.structs.replace(
                    one,
                    sampling=msgspec.structs.replace(
                        one.sampling, stop_ids=tuple(sorted(stops[one.request_id - 1]))
                    ),
                )
                if isinstance(one, Add)
                else one
                for one in inputs_of(mix, flushes, step)
                if not isinstance(one, Cancel)
            ]
            if step in pauses:
                inputs.append(Pause(100 + step, paused=pauses[step]))
            replica.turn(*inputs)
        replica.turn(Pause(99, paused=False))
        replica.finish()
        assert replica.load.free_blocks == replica.cache.total
        assert {answer.token for answer in replica.answers} >= {100 + step for step in pauses}
        ends.append((replica.outputs, replica.finishes, replica.ends))
    assert all(end == ends[0] for end in ends)


@settings(max_examples=50, deadline=None)
@given(mix=MIXES, data=st.data())
def test_a_stream_moved_at_any_point_continues_as_if_it_had_not_been(
    mix: list[Wanted], data: st.DataObject
) -> None:
    first = FakeReplica(kv_blocks=12, depth=2, futures=True)
    second = FakeReplica(kv_blocks=10, block_tokens=3, depth=3)
    for step in range(data.draw(st.integers(1, 20))):
        first.turn(*inputs_of(mix, set(), step))
    journals = {number: ids for number, ids in first.outputs.items() if not first.ends[number]}
    for number, ids in journals.items():
        one = mix[number - 1]
        journal = one.expected[: one.journal] + ids
        sampling = Sampling(seed=1, max_tokens=one.max_tokens, ignore_eos=True)
        second.turn(add(number, one.prompt, output=journal, sampling=sampling, salt=one.salt))
    second.finish()
    for number, ids in journals.items():
        one = mix[number - 1]
        assert one.expected[: one.journal] + ids + second.outputs[number] == one.expected
