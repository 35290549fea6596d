"""Penalties and bias hold through every mix, depth, retraction and move to another replica."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.oracle import Wishes, oracle_output
from tests.fakes.replica import ORDINARY, FakeReplica, add
from worker.request import Add, Sampling


@dataclass(frozen=True)
class Asked:
    """A request with wishes."""

    prompt: list[int]
    wishes: Wishes
    max_tokens: int
    arrives: int

    @property
    def expected(self) -> list[int]:
        return oracle_output(self.prompt, ORDINARY, self.max_tokens, self.wishes)

    def add(self, number: int, journal: list[int]) -> Add:
        sampling = Sampling(
            seed=1,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            repetition_penalty=self.wishes.repetition,
            presence_penalty=self.wishes.presence,
            frequency_penalty=self.wishes.frequency,
            logit_bias=self.wishes.bias,
        )
        return add(number, self.prompt, output=journal, sampling=sampling)


asked = st.builds(
    Asked,
    prompt=st.lists(st.sampled_from((3, 4)), min_size=1, max_size=12),
    wishes=st.builds(
        Wishes,
        repetition=st.sampled_from((1.0, 1.5)),
        presence=st.sampled_from((0.0, 0.5)),
        frequency=st.sampled_from((0.0, -0.5)),
        bias=st.sampled_from(
            ((), ((5, -100.0), (6, -100.0), (30, -100.0)), ((7, 100.0), (8, 100.0), (9, 100.0)))
        ),
    ),
    max_tokens=st.integers(1, 10),
    arrives=st.integers(0, 6),
)
mixes = st.lists(asked, min_size=1, max_size=6)
# One step at a time; two that overlap; micro-batches of two stages.
paces = st.sampled_from(((1, False), (2, True), (2, False)))


@settings(max_examples=100, deadline=None)
@given(mixes, paces, st.integers(0, 8), st.integers(5, 20), st.integers(0, 12))
def test_a_request_gets_the_same_ids_in_any_mix_and_when_it_moves(
    mix: list[Asked], pace: tuple[int, bool], spare_blocks: int, budget: int, moved_at: int
) -> None:
    replicas = [
        FakeReplica(
            depth=pace[0],
            futures=pace[1],
            kv_blocks=6 + spare_blocks,  # few enough that some are retracted
            max_model_len=24,
            max_batched_tokens=budget,
        )
        for _ in range(2)
    ]
    for step in range(moved_at + 1):
        replicas[0].turn(*(one.add(at, []) for at, one in enumerate(mix) if one.arrives == step))
    first = {at: list(replicas[0].outputs.get(at, [])) for at in range(len(mix))}
    replicas[1].turn(*(one.add(at, first[at]) for at, one in enumerate(mix)))
    replicas[1].finish()
    for at, one in enumerate(mix):
        assert first[at] == one.expected[: len(first[at])]
        assert first[at] + replicas[1].outputs.get(at, []) == one.expected
