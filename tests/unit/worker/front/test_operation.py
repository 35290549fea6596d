"""A group that is paused and given other weights, with ranks that the test plays."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import pytest

from radixmesh.blocks import Namespace, pack_ids
from radixmesh.errors import Draining, GroupLost, InvalidRequest, NoReplicaReady
from tests.fakes.jobs import Nobody
from tests.fakes.jobs import group as make_group
from tests.fakes.scripted_ranks import Row, ScriptedLauncher, ScriptedRanks
from worker.front.ask import Ask
from worker.front.crew import Crew
from worker.front.feed_out import Event
from worker.front.group import Group
from worker.front.jobs import StepPart
from worker.front.replica import Hold, Replica, ReplicaState
from worker.front.supervisor import Pace
from worker.request import LENGTH, Answer, Sampling


class Router:
    """Follows the group, and remembers."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.versions: list[str] = []
        self.states: list[tuple[int, ReplicaState]] = []
        group.subscribers.add(self)

    def on_info(self) -> None:
        self.versions.append(self.group.info.weight_version)

    def on_status(self, replica: Replica) -> None:
        self.states.append((replica.dp_rank, replica.state))

    def on_events(self, replica: Replica, events: Sequence[Event]) -> None: ...

    def on_load(self, replica: Replica) -> None: ...

    def on_tick(self) -> None: ...


class Caller(Nobody):
    """Remembers by which weights its ids were chosen."""

    def __init__(self) -> None:
        self.versions: list[str] = []
        self.news = asyncio.Event()

    def on_step(self, dp_rank: int, part: StepPart) -> None:
        if part.entry_ids:
            self.versions.append(part.weight_version)
            self.news.set()


def ask(dp_rank: int | None = None) -> Ask:
    return Ask(prompt=pack_ids([5]), sampling=Sampling(seed=1), dp_rank=dp_rank)


@asynccontextmanager
async def running(
    dp: int = 2,
) -> AsyncGenerator[tuple[Group, ScriptedLauncher, list[ScriptedRanks]], None]:
    """A group that is up."""
    group = make_group(dp, weight_version="w1")
    launcher = ScriptedLauncher()
    pace = Pace(backoff_initial_s=0.01, last_words_s=0.01)
    async with asyncio.TaskGroup() as tasks:
        crew = tasks.create_task(Crew(group, launcher, pace, retire_grace_s=5).run())
        await until_up(group)
        yield group, launcher, [await launcher.incarnation(each, 0) for each in range(dp)]
        crew.cancel()


async def until_up(group: Group, state: ReplicaState = ReplicaState.UP) -> None:
    await group.changed.until(lambda: all(each.state is state for each in group.replicas))


async def allow(ranks: Sequence[ScriptedRanks]) -> None:
    """Pause or go on, as ordered."""
    for each in ranks:
        each.step(answers=[Answer((await each.pause()).token)])


async def load(ranks: ScriptedRanks) -> None:
    """Take new weights, as ordered."""
    ranks.step(answers=[Answer((await ranks.weights()).token)])


async def test_a_paused_group_refuses_new_work_until_it_goes_on() -> None:
    async with running() as (group, _, ranks):
        pausing = asyncio.ensure_future(group.operation.pause())
        await allow(ranks)
        assert await pausing == {0: None, 1: None}
        with pytest.raises(Draining, match="the group is paused"):
            group.submit(Nobody(), 1, ask())
        assert not group.ready
        resuming = asyncio.ensure_future(group.operation.resume())
        orders = [await each.pause() for each in ranks]
        assert not any(order.paused for order in orders)
        for each, order in zip(ranks, orders, strict=True):
            each.step(answers=[Answer(order.token)])
        assert await resuming == {0: None, 1: None}
        group.submit(Nobody(), 1, ask())


async def test_a_replica_that_starts_in_a_paused_group_is_paused_before_it_computes() -> None:
    async with running() as (group, launcher, ranks):
        pausing = asyncio.ensure_future(group.operation.pause())
        await allow(ranks)
        await pausing
        ranks[0].die()
        again = await launcher.incarnation(0, 1)
        assert (await again.pause()).paused
        await until_up(group, ReplicaState.DRAINING)
        group.roster.scale(3)
        added = await launcher.incarnation(2, 0)
        assert (await added.pause()).paused


async def test_a_replica_that_is_lost_while_the_group_pauses_is_an_outcome() -> None:
    async with running() as (group, _, ranks):
        pausing = asyncio.ensure_future(group.operation.pause())
        await ranks[0].pause()
        ranks[0].die()
        await allow(ranks[1:])
        outcomes = await pausing
        assert isinstance(outcomes[0], GroupLost)
        assert outcomes[1] is None


async def test_new_weights_reach_every_replica_and_every_router() -> None:
    async with running() as (group, _, ranks):
        router = Router(group)
        changing = asyncio.ensure_future(group.operation.update_weights("/models/next", "w2"))
        order = await ranks[0].weights()
        assert (order.folder, order.version) == ("/models/next", "w2")
        with pytest.raises(Draining, match="the group is changing its weights"):
            group.submit(Nobody(), 1, ask())
        ranks[0].step(answers=[Answer(order.token)])
        await load(ranks[1])
        assert await changing == {0: None, 1: None}
        assert router.versions == ["w2"]
        assert group.info.weight_version == "w2"
        assert router.states[:2] == [(0, ReplicaState.DRAINING), (1, ReplicaState.DRAINING)]
        assert router.states[2:] == [(0, ReplicaState.UP), (1, ReplicaState.UP)]
        group.submit(Nobody(), 1, ask(dp_rank=0))
        [add] = await ranks[0].adds(1)
        name = Namespace(model="tiny", weight_version="w2", fingerprint="f" * 64)
        assert add.namespace == name.encode(), "what was cached with others is never found"


async def test_every_share_names_the_weights_that_chose_its_ids() -> None:
    async with running() as (group, _, ranks):
        callers = [Caller(), Caller()]
        adds = []
        for dp_rank, caller in enumerate(callers):
            group.submit(caller, 1, ask(dp_rank))
            adds += await ranks[dp_rank].adds(1)
        changing = asyncio.ensure_future(group.operation.update_weights("/models/next", "w2"))
        order = await ranks[0].weights()
        # One write, so the front reads all at once: the order of what it says must decide.
        ranks[0].step([Row(adds[0].request_id, 0, [9])])
        ranks[0].step([Row(adds[0].request_id, 1, [9])], answers=[Answer(order.token)])
        ranks[0].step([Row(adds[0].request_id, 2, [9], LENGTH)])
        ranks[1].step([Row(adds[1].request_id, 0, [9])])
        await load(ranks[1])
        ranks[1].step([Row(adds[1].request_id, 1, [9], LENGTH)])
        await changing
        await group.idle()
        assert callers[0].versions == ["w1", "w1", "w2"]
        assert callers[1].versions == ["w1", "w2"]


async def test_weights_that_the_first_replica_refuses_change_nothing() -> None:
    async with running() as (group, _, ranks):
        router = Router(group)
        changing = asyncio.ensure_future(group.operation.update_weights("/models/small", "w2"))
        token = (await ranks[0].weights()).token
        refusal = Answer(token, reason="INVALID_REQUEST", message="another shape")
        ranks[0].step(answers=[refusal])
        with pytest.raises(InvalidRequest, match="another shape"):
            await changing
        assert group.info.weight_version == "w1"
        assert router.versions == []
        assert group.ready
        group.submit(Nobody(), 1, ask(dp_rank=1))
        await ranks[1].adds(1)


async def test_a_replica_that_alone_fails_at_new_weights_starts_anew_with_them() -> None:
    async with running() as (group, launcher, ranks):
        changing = asyncio.ensure_future(group.operation.update_weights("/models/next", "w2"))
        await load(ranks[0])
        token = (await ranks[1].weights()).token
        ranks[1].step(answers=[Answer(token, reason="INTERNAL", message="no memory")])
        outcomes = await changing
        assert outcomes[0] is None
        assert outcomes[1] is not None
        again = await launcher.incarnation(1, 1)
        await load(again)
        await until_up(group)
        assert group.replicas[1].weight_version == "w2"


async def test_a_replica_that_starts_later_computes_with_the_new_weights() -> None:
    async with running() as (group, launcher, ranks):
        changing = asyncio.ensure_future(group.operation.update_weights("/models/next", "w2"))
        for each in ranks:
            await load(each)
        await changing
        ranks[1].die()
        again = await launcher.incarnation(1, 1)
        order = await again.weights()
        assert order.version == "w2"
        assert group.replicas[1].state is ReplicaState.DOWN, "not before it has them"
        again.step(answers=[Answer(order.token)])
        await until_up(group)
        group.roster.scale(3)
        added = await launcher.incarnation(2, 0)
        await load(added)
        await until_up(group)


async def test_a_replica_that_starts_during_a_change_does_not_serve_with_the_old_weights() -> None:
    async with running() as (group, launcher, ranks):
        launcher.passes_test = False
        ranks[1].die()
        slow = await launcher.incarnation(1, 1)
        changing = asyncio.ensure_future(group.operation.update_weights("/models/next", "w2"))
        await load(ranks[0])
        assert await changing == {0: None}
        launcher.passes_test = True
        await slow.under_test.wait()
        slow.step([Row(slow.last_request_id, 0, [7, 8], LENGTH)])
        again = await launcher.incarnation(1, 2)
        await load(again)
        await until_up(group)


async def test_a_change_that_its_caller_leaves_ends_with_one_kind_of_weights() -> None:
    async with running() as (group, launcher, ranks):
        changing = asyncio.ensure_future(group.operation.update_weights("/models/next", "w2"))
        await load(ranks[0])
        await ranks[1].weights()
        changing.cancel()
        await asyncio.wait([changing])
        group.tick()
        again = await launcher.incarnation(1, 1)
        await load(again)
        await until_up(group)
        assert {each.weight_version for each in group.replicas} == {"w2"}
        assert not any(Hold.RELOADING in each.holds for each in group.replicas)


async def test_nobody_is_there_to_take_new_weights() -> None:
    async with running(dp=1) as (group, launcher, ranks):
        launcher.ready = None
        ranks[0].die()
        await launcher.incarnation(0, 1)
        with pytest.raises(NoReplicaReady):
            await group.operation.update_weights("/models/next", "w2")
        assert group.info.weight_version == "w1"
