"""Groups that say what can't be: it harms their own links at most, and nobody's prices."""

import math
from dataclasses import replace

import pytest

from radixmesh.rpc.link import Lane
from radixmesh.worker.v1 import feed_pb2
from radixmesh.worker.v1.worker_service_pb2 import AttachResponse, Step
from router.edge.fleet import to_candidate, to_replica
from router.fleet.group import REPLICAS_LIMIT
from router.fleet.registry import Fleet
from router.fleet.wire import COUNT_LIMIT
from tests.fakes.fleet import Output, ask, count_ready, running_fleet, spec, until
from tests.fakes.worker import FakeWorker

PROMPT = list(range(100, 120))


class Liar(FakeWorker):
    """Says of its rates whatever it is told to."""

    rate = 5000.0
    decode_s = 0.01

    def _load(self, handler: object) -> feed_pb2.Load:
        load = super()._load(handler)  # type: ignore[arg-type]
        load.prefill_rates[:] = [self.rate] * self.shape.dp
        load.decode_step_seconds[:] = [self.decode_s] * self.shape.dp
        return load

    def load(self) -> feed_pb2.Load:
        """What it would say of its load now."""
        return self._load(self._handlers[0])

    def say(self, frame: AttachResponse) -> None:
        """Tell all routers something."""
        for handler in self._handlers:
            handler.session.send(frame, Lane.CONTROL)


@pytest.mark.parametrize("lie", [math.nan, math.inf, -math.inf, -5.0, 1e-45, 3e38])
@pytest.mark.parametrize("what", ["rate", "decode_s"])
async def test_a_rate_that_can_not_be_spoils_no_choice(what: str, lie: float) -> None:
    async with Liar() as honest, Liar() as liar:
        setattr(liar, what, lie)
        async with running_fleet(honest.address, liar.address, ready=2) as fleet:
            await until(fleet, lambda: rates_known(fleet, honest.address))
            await proven(fleet, liar)
            prices = fleet.explain(ask(PROMPT))
            assert all(math.isfinite(each.total_s) and each.total_s >= 0 for each in prices)
            output = Output()
            fleet.submit(fleet.place(ask(PROMPT)), spec(PROMPT), output)
            await output.ended()
            assert output.error is None


async def test_the_largest_counts_can_be_shown() -> None:
    async with Liar() as liar, running_fleet(liar.address, ready=1) as fleet:
        most = (1 << 32) - 1
        load = liar.load()
        load.running_counts[:] = load.waiting_counts[:] = [most]
        load.free_block_counts[:] = load.uncached_token_counts[:] = [(1 << 64) - 1]
        liar.paused = liar.silent_load = True
        liar.say(AttachResponse(loads=[load]))
        await until(fleet, lambda: fleet.replicas()[0].running > 1)
        fleet.submit(fleet.place(ask(PROMPT)), spec(PROMPT), Output())
        assert [to_replica(row).running_count for row in fleet.replicas()] == [COUNT_LIMIT]
        assert to_candidate(fleet.explain(ask(PROMPT))[0]).waiting_count == COUNT_LIMIT + 1


def rates_known(fleet: Fleet, group_id: str) -> bool:
    return any(row.group_id == group_id and row.prefill_rate for row in fleet.replicas())


async def proven(fleet: Fleet, worker: FakeWorker) -> None:
    """Wait until the fleet has heard two more loads of a worker."""
    for _ in range(2):
        worker.prove()
        await fleet.changed()


MALFORMED = {
    "columns of a step": AttachResponse(steps=[Step(entry_ids=[1, 2], positions=[0], counts=[1])]),
    "ids of a step": AttachResponse(steps=[Step(entry_ids=[1], positions=[0], counts=[2])]),
    "columns of a load": AttachResponse(loads=[feed_pb2.Load(dp_ranks=[0, 1], incarnations=[1])]),
    "too many replicas": AttachResponse(
        statuses=[
            feed_pb2.ReplicaStatus(
                dp_rank=REPLICAS_LIMIT, incarnation=1, state=feed_pb2.REPLICA_STATE_UP
            )
        ]
    ),
    "the last number": AttachResponse(
        statuses=[
            feed_pb2.ReplicaStatus(
                dp_rank=(1 << 32) - 1, incarnation=1, state=feed_pb2.REPLICA_STATE_UP
            )
        ]
    ),
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED)
async def test_a_malformed_frame_ends_its_own_link_alone(frame: AttachResponse) -> None:
    async with (
        FakeWorker() as honest,
        Liar() as liar,
        running_fleet(honest.address, liar.address, ready=2) as fleet,
    ):
        mine, other = fleet.groups.get(liar.address), fleet.groups.get(honest.address)
        honest.paused = True
        output, booking = Output(), fleet.place(replace(ask(PROMPT), hint_group=other.group_id))
        fleet.submit(booking, spec(PROMPT), output)
        liar.say(frame)
        await until(fleet, lambda: not mine.link.connected)
        await until(fleet, lambda: count_ready(fleet) == 2)
        assert len(fleet.replicas()) == 2
        honest.paused = False
        await output.ended()
        assert output.error is None


async def test_a_group_that_says_no_limits_sets_none_for_the_others() -> None:
    async with (
        FakeWorker(max_model_len=0, vocab_size=0) as silent,
        FakeWorker() as said,
        running_fleet(silent.address, said.address, ready=2) as fleet,
    ):
        limits = fleet.limits("tiny")
        assert limits.max_model_len == said.shape.max_model_len
        assert limits.vocab_size == said.shape.vocab_size
