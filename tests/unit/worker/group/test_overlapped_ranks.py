"""Ranks that plan a step while the one before is computed in another thread."""

from collections.abc import Iterator

import pytest

from radixmesh.blocks import unpack_ids
from tests.fakes.oracle import oracle_output
from tests.fakes.rank_threads import RankThreads
from tests.fakes.replica import ORDINARY, add
from worker.request import Cancel, Sampling


@pytest.fixture(params=[1, 2])
def replica(request: pytest.FixtureRequest) -> Iterator[RankThreads]:
    replica = RankThreads(tp=request.param, kv_blocks=40, overlap=True)
    yield replica
    replica.close()


def test_they_give_the_oracle_s_ids_under_cancels_and_pressure(replica: RankThreads) -> None:
    prompts = {number: [3 + number % 5] * (5 + 4 * number) for number in range(1, 13)}
    long = Sampling(seed=1, max_tokens=12, ignore_eos=True)
    for number, prompt in prompts.items():
        replica.front.send(add(number, prompt, sampling=long), add(100 + number, prompt))
        replica.front.send(Cancel([100 + number]))
    ids: dict[int, list[int]] = {}
    ended: set[int] = set()
    load = None
    while ended < prompts.keys() or load is None or load.running:
        output = next(replica.front.outputs())
        at = iter(unpack_ids(output.token_ids))
        for request_id, count, finish in zip(
            output.request_ids, output.counts, output.finishes, strict=True
        ):
            ids.setdefault(request_id, []).extend(next(at) for _ in range(count))
            if finish and request_id < 100:
                ended.add(request_id)
        load = output.load
    assert {number: ids[number] for number in prompts} == {
        number: oracle_output(prompt, ORDINARY, 12) for number, prompt in prompts.items()
    }
    assert (load.waiting, load.free_blocks) == (0, 40)
    replica.close()
    assert len({turns.digest for turns in replica.turns}) == 1
    assert all(turns.idle for turns in replica.turns)
