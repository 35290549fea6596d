"""Four ranks as real processes, and thousands of submits, cancels, deadlines and flushes.

Every rank answers every record with the digest of all that it planned and drew, and rank
(0, 0) ends the replica when one differs: so a machine that gets through has had equal
digests at every step. What is checked besides: each request ends exactly once, its ids are
the oracle's, and at the end every block is accounted for.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from radixmesh.blocks import Namespace, pack_ids, unpack_ids
from tests.fakes.forks import ForkedRanks, Forks
from tests.fakes.oracle import oracle_output, ordinary_ids
from worker.config import FakeConfig, RankConfig
from worker.request import (
    Add,
    Answer,
    Cancel,
    Flush,
    Inbound,
    Pause,
    Probe,
    Ready,
    Sampling,
    StepOutput,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

BLOCK_TOKENS, KV_BLOCKS, MAX_MODEL_LEN = 4, 24, 64
SHAPES = {
    "pp2xtp2": {"pp": 2, "tp": 2},
    "tp4-overlapped": {"tp": 4, "overlap": True},
}


class Client:
    """The front of one replica for the length of a test; request numbers are never reused."""

    def __init__(self, ranks: ForkedRanks, ordinary: list[int]) -> None:
        self.ranks = ranks
        self.ordinary = ordinary
        self.expected: dict[int, list[int]] = {}
        self.drawn: dict[int, list[int]] = {}
        self.open: set[int] = set()
        self.ended: dict[int, str] = {}
        self.answers: list[Answer] = []
        self.last: StepOutput | None = None
        self.sent = 0
        self._numbers = iter(range(1, 1 << 30))
        self._barriers = iter(range(1 << 40, 1 << 41))

    def send(self, *messages: Inbound) -> None:
        self.sent += len(messages)
        self.ranks.front.send(*messages)

    def submit(self, prompt: list[int], count: int, priority: int, timeout_ms: int) -> int:
        number = next(self._numbers)
        ids = [self.ordinary[index] for index in prompt]
        self.expected[number] = oracle_output(ids, self.ordinary, count)
        self.drawn[number] = []
        self.open.add(number)
        sampling = Sampling(seed=1, max_tokens=count, ignore_eos=True)
        namespace = Namespace(model="tiny").encode()
        self.send(Add(number, pack_ids(ids), b"", sampling, namespace, priority, timeout_ms))
        return number

    def cancel(self, *numbers: int) -> None:
        self.send(Cancel(list(numbers)))
        for number in numbers:
            if number in self.open:
                self.open.discard(number)
                self.ended[number] = "cancelled"

    def settle(self) -> None:
        """Read until every rank has planned a step after all that was sent."""
        token = next(self._barriers)
        self.send(Probe(token))
        while all(answer.token != token for answer in self.answers):
            self.read()

    def read(self) -> None:
        output = self.ranks.front.receive()
        assert isinstance(output, StepOutput), output
        self.last = output
        self.answers += output.answers
        at = iter(unpack_ids(output.token_ids))
        columns = zip(
            output.request_ids, output.positions, output.counts, output.finishes, strict=True
        )
        for number, position, count, finish in columns:
            ids = [next(at) for _ in range(count)]
            if number in self.open:
                assert position == len(self.drawn[number])
                self.drawn[number] += ids
                assert self.drawn[number] == self.expected[number][: len(self.drawn[number])]
            if finish:
                self._end(number, "finished")
        for failed in output.failed:
            assert failed.reason == "DEADLINE_EXCEEDED"
            self._end(failed.request_id, "expired")

    def _end(self, number: int, how: str) -> None:
        if self.ended.get(number) == "cancelled":
            return  # the two met on their way
        assert number not in self.ended, f"{number} ended twice"
        self.open.discard(number)
        self.ended[number] = how
        if how == "finished":
            assert self.drawn[number] == self.expected[number]


class Lockstep(RuleBasedStateMachine):
    """Anything that a front may send, in any order."""

    client: Client

    @initialize()
    def begin(self) -> None:
        self.mine: list[int] = []

    @rule(
        prompt=st.lists(st.sampled_from((3, 4)), min_size=1, max_size=40),
        count=st.integers(1, 20),
        priority=st.integers(-1, 1),
        timeout_ms=st.sampled_from((0, 0, 0, 1, 3, 10)),
    )
    def submit(self, prompt: list[int], count: int, priority: int, timeout_ms: int) -> None:
        self.mine.append(self.client.submit(prompt, count, priority, timeout_ms))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        # An ended or unknown number changes nothing.
        known = self.mine[-8:] or [1 << 30]
        self.client.cancel(*data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=3)))

    @rule()
    def flush(self) -> None:
        self.client.send(Flush(1))

    @rule()
    def pause_and_go_on(self) -> None:
        self.client.send(Pause(2, paused=True), Pause(3, paused=False))

    @rule()
    def wait(self) -> None:
        self.client.settle()

    def teardown(self) -> None:
        client = self.client
        while client.open:
            client.read()
        client.send(Flush(4))
        client.settle()
        assert client.last is not None
        load = client.last.load
        assert (load.running, load.waiting, load.uncached_tokens) == (0, 0, 0)
        assert load.free_blocks == KV_BLOCKS
        assert (client.last.digest.block_count, client.last.digest.xor_keys) == (0, 0)


@pytest.fixture(params=[f"{carrier} {shape}" for carrier in ("local", "gloo") for shape in SHAPES])
def client(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Client]:
    carrier, shape = request.param.split()
    values: dict[str, Any] = SHAPES[shape]
    config = RankConfig(
        model_dir=str(model_dir),
        engine="fake",
        carrier=carrier,
        block_tokens=BLOCK_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_running=6,
        max_batched_tokens=24,
        fake=FakeConfig(kv_blocks=KV_BLOCKS),
        **values,
    )
    forks = Forks(config)
    ranks = ForkedRanks(forks, config)
    try:
        assert isinstance(ranks.front.receive(), Ready)
        yield Client(ranks, ordinary_ids(model_dir))
    finally:
        ranks.close()
        forks.close()


def test_ranks_stay_equal_and_lose_nothing_whatever_is_sent(client: Client) -> None:
    class Here(Lockstep):
        pass

    Here.client = client
    run_state_machine_as_test(
        Here, settings=settings(max_examples=120, stateful_step_count=60, deadline=None)
    )
    outcomes = set(client.ended.values())
    assert {"finished", "cancelled"} <= outcomes
    # How many there are of each kind is up to the search, and changes with the code.
    assert len(client.ended) > 300
    assert client.sent > 1500
