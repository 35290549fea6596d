"""The pace of restarts: a pause that doubles, up to a bound, and is short again after health."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from tests.fakes.jobs import group
from tests.fakes.scripted_ranks import READY, ScriptedLauncher, ScriptedRanks
from worker.front.group import Group
from worker.front.supervisor import CannotStart, KeepsFailing, Launch, Pace, Ranks, Supervisor
from worker.request import Broken


class FailingLaunch:
    """Cannot start a process; notes when it was asked to."""

    def __init__(self) -> None:
        self.instants: list[float] = []
        self._enough = asyncio.Event()

    async def __call__(self, dp_rank: int, incarnation: int) -> Ranks:
        self.instants.append(asyncio.get_running_loop().time())
        self._enough.set()
        raise OSError("no more processes")

    async def asked(self, times: int) -> list[float]:
        while len(self.instants) < times:
            self._enough.clear()
            await self._enough.wait()
        return [after - before for before, after in pairwise(self.instants)]


@asynccontextmanager
async def supervised(
    made: Group, launch: Launch, pace: Pace, *, dp_rank: int = 0
) -> AsyncGenerator[None, None]:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(Supervisor(made.replicas[dp_rank], made, launch, pace).run())
        yield
        running.cancel()


async def test_the_pause_between_starts_doubles_up_to_its_bound() -> None:
    launch = FailingLaunch()
    pace = Pace(backoff_initial_s=0.02, backoff_max_s=0.08)
    async with supervised(group(), launch, pace):
        pauses = await launch.asked(6)
    wanted = [0.02, 0.04, 0.08, 0.08, 0.08]
    assert all(pause >= least for pause, least in zip(pauses, wanted, strict=False))
    assert launch.instants[5] - launch.instants[0] < 5


async def test_after_a_healthy_life_the_pause_is_the_first_again() -> None:
    launcher = ScriptedLauncher()
    made = group()
    # Doubling from 0.1 s, seven restarts would take 12.7 s.
    pace = Pace(backoff_initial_s=0.1, backoff_max_s=100, healthy_s=0, last_words_s=0.01)
    async with supervised(made, launcher, pace):
        async with asyncio.timeout(6):
            for number in range(8):
                ranks = await launcher.incarnation(0, number)
                await made.changed.until(lambda: made.ready)
                ranks.die()
                await ranks.ended.wait()


async def test_a_start_that_takes_long_and_fails_is_no_healthy_life() -> None:
    launcher = ScriptedLauncher(ready=None)
    made = group()
    pace = Pace(startup_s=0.02, backoff_initial_s=0.001, healthy_s=0, dump_s=0)
    async with supervised(made, launcher, pace):
        await (await launcher.incarnation(0, 2)).ended.wait()
        await launcher.incarnation(0, 3)
        assert made.replicas[0].failures == 3


async def test_a_front_whose_replicas_all_fail_again_and_again_ends_and_says_why() -> None:
    launcher = ScriptedLauncher(ready=None)
    made = group()
    pace = Pace(backoff_initial_s=0.001, last_words_s=0.001, max_failures=4)
    running = asyncio.ensure_future(Supervisor(made.replicas[0], made, launcher, pace).run())
    for number in range(4):
        (await launcher.incarnation(0, number)).die("rank dp=0 was killed by SIGSEGV")
    with pytest.raises(KeepsFailing, match="4 times in a row: rank dp=0 was killed by SIGSEGV"):
        await running
    assert len(launcher.ranks[0]) == 4
    assert KeepsFailing.exit_status == 1


async def test_a_replica_that_fails_for_ever_does_not_end_a_front_with_a_sibling_that_is_well() -> (
    None
):
    launcher = ScriptedLauncher()
    made = group(dp=2)
    pace = Pace(backoff_initial_s=0.001, backoff_max_s=0.001, last_words_s=0.001, max_failures=2)
    async with supervised(made, launcher, pace, dp_rank=1), supervised(made, launcher, pace):
        for number in range(6):
            (await launcher.incarnation(0, number)).die()
        await launcher.incarnation(0, 6)
        assert not launcher.ranks[1][0].ended.is_set()


async def test_a_healthy_life_is_forgiven_what_came_before() -> None:
    launcher = ScriptedLauncher()
    made = group()
    pace = Pace(backoff_initial_s=0.001, healthy_s=0, last_words_s=0.001, max_failures=2)
    async with supervised(made, launcher, pace):
        for number in range(5):
            ranks = await launcher.incarnation(0, number)
            await made.changed.until(lambda: made.ready)
            ranks.die()
            await ranks.ended.wait()


async def test_incarnations_are_never_the_same() -> None:
    launcher = ScriptedLauncher()
    pace = Pace(backoff_initial_s=0.001, backoff_max_s=0.001, last_words_s=0.001)
    async with supervised(group(), launcher, pace):
        lives = [await launcher.incarnation(0, 0)]
        for number in range(1, 20):
            lives[-1].die()
            lives.append(await launcher.incarnation(0, number))
    numbers = {life.incarnation for life in lives}
    assert len(numbers) == 20
    assert all(0 < number < 2**64 for number in numbers)


async def test_a_cancelled_supervisor_leaves_no_rank_and_no_replica_up() -> None:
    made = group()
    launcher = ScriptedLauncher()
    async with supervised(made, launcher, Pace()):
        await made.changed.until(lambda: made.ready)
    ranks: ScriptedRanks = launcher.ranks[0][0]
    assert ranks.ended.is_set()
    assert not made.ready
    assert made.info.kv_blocks == READY.kv_blocks


def refusing(ranks: ScriptedRanks, reason: str) -> None:
    """End as ranks do that can't be what they are told to be."""
    ranks.send(Broken(reason, "not with --tp 2"))
    ranks.die("rank dp=0 exited with status 1")


@pytest.mark.parametrize("reason", ["NOT_SUPPORTED", "INVALID_REQUEST"])
async def test_ranks_that_refuse_their_configuration_are_not_started_again(reason: str) -> None:
    launcher = ScriptedLauncher(ready=None)
    made = group()
    running = asyncio.ensure_future(
        Supervisor(made.replicas[0], made, launcher, Pace(last_words_s=0.01)).run()
    )
    refusing(await launcher.incarnation(0, 0), reason)
    with pytest.raises(CannotStart, match="not with --tp 2"):
        await running
    [ranks] = launcher.ranks[0]
    assert ranks.dumps == 0, "they said why they end"


async def test_what_may_heal_is_tried_again() -> None:
    launcher = ScriptedLauncher(ready=None)
    pace = Pace(backoff_initial_s=0.01, last_words_s=0.01)
    async with supervised(group(), launcher, pace):
        refusing(await launcher.incarnation(0, 0), "INTERNAL")
        refusing(await launcher.incarnation(0, 1), "GROUP_LOST")
        await launcher.incarnation(0, 2)


async def test_a_group_that_has_been_ready_is_not_ended_by_a_refusal() -> None:
    launcher = ScriptedLauncher()
    made = group()
    pace = Pace(backoff_initial_s=0.01, last_words_s=0.01)
    async with supervised(made, launcher, pace):
        await made.description.complete()
        launcher.ready = None
        (await launcher.incarnation(0, 0)).die()
        refusing(await launcher.incarnation(0, 1), "INVALID_REQUEST")
        await launcher.incarnation(0, 2)
