"""The fleet over real links to the contract of a worker group."""

import asyncio
import time

import pytest

from radixmesh.errors import GroupLost, LinkLost, NoReplicaReady, QueueFull
from router.fleet.registry import Fleet
from router.fleet.views import Phase
from router.policy.choice import View
from tests.fakes.fleet import Output, ask, count_ready, running_fleet, spec, until
from tests.fakes.oracle import oracle_output
from tests.fakes.worker import FakeWorker

PROMPT = list(range(100, 134))  # 8 blocks, and a beginning of one


def indexed(fleet: Fleet, worker: FakeWorker) -> bool:
    """Whether the index equals the group's caches."""
    group = next(g for g in fleet.groups if g.address == worker.address)
    return all(
        fleet.tree.keys_of(group.replicas[rank].feed.number) == set(replica.cache.keys)
        for rank, replica in enumerate(worker.replicas)
    )


async def test_a_prompt_goes_to_the_replica_that_holds_it_and_gets_its_ids() -> None:
    async with FakeWorker(dp=4) as worker:
        worker.warm(3, PROMPT)
        async with running_fleet(worker.address, ready=4) as fleet:
            booking = fleet.place(ask(PROMPT))
            output = Output()
            fleet.submit(booking, spec(PROMPT), output)
            await output.ended()
    assert booking.dp_rank == 3
    assert (booking.prompt_blocks, booking.predicted_blocks) == (8, 8)
    assert worker.submits[0].dp_rank == 3
    assert output.cached_tokens == 32
    assert output.ids == oracle_output(PROMPT, worker.shape.ordinary, 8)
    assert booking.released


async def test_what_one_replica_of_a_group_holds_says_nothing_of_its_sibling() -> None:
    prompts = [[1000 * at + each for each in PROMPT] for at in range(6)]
    async with FakeWorker(dp=2) as worker:
        for at, prompt in enumerate(prompts):
            worker.warm(at % 2, prompt)
        async with running_fleet(worker.address, ready=2) as fleet:
            for at, prompt in enumerate(prompts):
                held = {each.dp_rank: each.matched_blocks for each in fleet.explain(ask(prompt))}
                assert held == {at % 2: 8, 1 - at % 2: 0}
                assert fleet.place(ask(prompt)).dp_rank == at % 2


async def test_the_blocks_of_an_output_become_part_of_the_view() -> None:
    async with FakeWorker(dp=2) as worker, running_fleet(worker.address, ready=2) as fleet:
        first = fleet.place(ask(PROMPT))
        output = Output()
        fleet.submit(first, spec(PROMPT), output)
        await output.ended()
        await until(fleet, lambda: indexed(fleet, worker))
        second = fleet.place(ask(PROMPT))
        assert first.predicted_blocks == 0
        assert second.predicted_blocks == 8
        assert second.dp_rank == first.dp_rank
        assert fleet.tree.marked_count == 0


async def test_a_salt_is_a_namespace_of_its_own() -> None:
    async with FakeWorker() as worker:
        worker.warm(0, PROMPT, salt="a")
        async with running_fleet(worker.address, ready=1) as fleet:
            assert fleet.place(ask(PROMPT, salt="a")).predicted_blocks == 8
            assert fleet.place(ask(PROMPT, salt="b")).predicted_blocks == 0
            assert fleet.place(ask(PROMPT, adapter="a")).predicted_blocks == 0


async def test_a_router_that_comes_late_has_the_whole_cache_before_it_routes() -> None:
    async with FakeWorker(dp=2) as worker:
        for base in range(0, 3000, 40):
            worker.warm(base // 40 % 2, range(base, base + 40))
        async with running_fleet(worker.address, ready=2) as fleet:
            assert indexed(fleet, worker)
            assert all(group.settled(time.monotonic()) for group in fleet.groups)
            assert {replica.view for replica in fleet.replicas()} == {View.EXACT}


async def test_a_lost_event_costs_the_view_until_a_new_snapshot() -> None:
    async with FakeWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        worker.lose_events = True
        worker.warm(0, PROMPT)
        worker.lose_events = False
        worker.warm(0, range(500, 532))
        await until(fleet, lambda: worker.resnapshots == 1 and indexed(fleet, worker))
        assert fleet.replicas()[0].view is View.EXACT


async def test_an_event_lost_at_the_end_is_found_by_the_digest() -> None:
    async with FakeWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        worker.lose_events = True
        worker.warm(0, PROMPT)
        await until(fleet, lambda: indexed(fleet, worker))
        assert worker.resnapshots == 1


async def test_a_wrong_digest_ends_in_blind_after_three_times() -> None:
    async with FakeWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        worker.replicas[0].cache.digest_error = 1
        await until(fleet, lambda: fleet.replicas()[0].view is View.BLIND)
        assert worker.resnapshots == 2
        assert fleet.place(ask(PROMPT)).predicted_blocks == 0


async def test_a_replica_that_dies_fails_its_own_outputs_only() -> None:
    async with FakeWorker(dp=2) as worker, running_fleet(worker.address, ready=2) as fleet:
        worker.paused = True
        worker.warm(0, PROMPT)
        worker.warm(1, range(500, 532))
        await until(fleet, lambda: indexed(fleet, worker))
        outputs = [Output(), Output()]
        bookings = [fleet.place(ask(PROMPT)), fleet.place(ask(range(500, 532)))]
        fleet.submit(bookings[0], spec(PROMPT), outputs[0])
        fleet.submit(bookings[1], spec(range(500, 532)), outputs[1])
        await outputs[1].until(lambda output: output.accepted > 0)
        worker.restart_replica(0)
        await outputs[0].ended()
        assert isinstance(outputs[0].error, GroupLost)
        assert bookings[0].released
        assert outputs[1].ends == 0
        await until(fleet, lambda: count_ready(fleet) == 2)
        assert fleet.place(ask(PROMPT)).predicted_blocks == 0
        worker.paused = False
        await outputs[1].ended()
        assert len(outputs[1].ids) == 8
        assert [output.ends for output in outputs] == [1, 1]


async def test_a_group_that_dies_takes_its_blocks_and_bookings_along_and_comes_back() -> None:
    async with FakeWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        worker.paused = True
        worker.warm(0, PROMPT)
        await until(fleet, lambda: indexed(fleet, worker))
        output = Output()
        booking = fleet.place(ask([*PROMPT, 1, 2, 3, 4]))
        fleet.submit(booking, spec([*PROMPT, 1, 2, 3, 4]), output)
        await output.until(lambda output: output.accepted > 0)
        await worker.kill()
        await output.ended()
        assert isinstance(output.error, LinkLost)
        assert booking.released
        with pytest.raises(NoReplicaReady):
            fleet.place(ask(PROMPT))
        assert fleet.replicas()[0].phase is Phase.CONNECTING
        assert fleet.replicas()[0].in_flight == 0
        await worker.restart()
        async with asyncio.timeout(5):
            await fleet.wait_ready("tiny")
        assert fleet.place(ask(PROMPT)).predicted_blocks == 0


async def test_a_cancelled_output_frees_its_place_here_and_there() -> None:
    async with FakeWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        worker.paused = True
        output = Output()
        booking = fleet.place(ask(PROMPT))
        ticket = fleet.submit(booking, spec(PROMPT), output)
        await output.until(lambda output: output.accepted > 0)
        ticket.cancel()
        ticket.cancel()
        assert fleet.replicas()[0].in_flight == 0
        assert fleet.tree.marked_count == 0
        await until(fleet, lambda: worker.running == 0)
        assert output.ends == 0


async def test_a_refusal_reaches_the_sink_as_its_error() -> None:
    async with FakeWorker() as worker, running_fleet(worker.address, ready=1) as fleet:
        worker.refuse.append(QueueFull("full"))
        output = Output()
        booking = fleet.place(ask(PROMPT))
        fleet.submit(booking, spec(PROMPT), output)
        await output.ended()
        assert isinstance(output.error, QueueFull)
        assert booking.released


async def test_a_draining_replica_gets_nothing_new_and_finishes_what_it_has() -> None:
    async with FakeWorker(dp=2) as worker, running_fleet(worker.address, ready=2) as fleet:
        worker.paused = True
        worker.warm(0, PROMPT)
        await until(fleet, lambda: indexed(fleet, worker))
        output = Output()
        fleet.submit(fleet.place(ask(PROMPT)), spec(PROMPT), output)
        await output.until(lambda output: output.accepted > 0)
        worker.drain_replica(0)
        await until(fleet, lambda: count_ready(fleet) == 1)
        assert {fleet.place(ask(PROMPT)).dp_rank for _ in range(20)} == {1}
        worker.paused = False
        await output.ended()
        assert len(output.ids) == 8


async def test_a_removed_group_fails_its_outputs_and_leaves_nothing() -> None:
    async with (
        FakeWorker() as one,
        FakeWorker() as two,
        running_fleet(one.address, two.address, ready=2) as fleet,
    ):
        one.paused = True
        one.warm(0, PROMPT)
        await until(fleet, lambda: indexed(fleet, one))
        output = Output()
        fleet.submit(fleet.place(ask(PROMPT)), spec(PROMPT), output)
        await output.until(lambda output: output.accepted > 0)
        fleet.remove_group(one.address)
        await output.ended()
        assert isinstance(output.error, LinkLost)
        assert [replica.group_id for replica in fleet.replicas()] == [two.address]
        await until(fleet, lambda: fleet.tree.sweep(1000) and len(fleet.tree) == 0)
        assert fleet.add_group(one.address) == one.address
        await until(fleet, lambda: count_ready(fleet) == 2 and indexed(fleet, one))


async def test_a_replica_that_sends_no_load_is_judged_by_what_was_booked_there() -> None:
    async with FakeWorker(dp=2) as worker:
        worker.silent_load = True
        worker.paused = True
        async with running_fleet(worker.address, ready=2) as fleet:
            ranks = [fleet.place(ask(range(base, base + 40))).dp_rank for base in range(0, 800, 40)]
    assert abs(ranks.count(0) - ranks.count(1)) <= 2
