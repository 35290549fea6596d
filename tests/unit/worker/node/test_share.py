"""A host's ranks of a replica: which of their ends is told."""

import asyncio
from typing import cast

import pytest

from worker.group.topology import Place
from worker.node.forks import ForkServer, RankProcess
from worker.node.share import Share


@pytest.fixture
async def share() -> Share:
    """Three ranks that run."""
    loop = asyncio.get_running_loop()
    share = Share(cast(ForkServer, None), None, [])
    share.ranks = [
        RankProcess(rank, Place(0, 0, rank), loop.create_future(), loop.create_future())
        for rank in range(3)
    ]
    return share


@pytest.mark.parametrize(
    ("status", "how"), [(-9, "was killed by SIGKILL"), (1, "exited with status 1")]
)
async def test_a_rank_that_left_as_another_died_is_not_blamed(
    share: Share, status: int, how: str
) -> None:
    telling = asyncio.ensure_future(share.first_end())
    share.ranks[2].ended.set_result(0)
    await asyncio.wait([telling], timeout=0.01)
    share.ranks[0].ended.set_result(status)
    assert await telling == f"rank dp=0 pp=0 tp=0 {how}"


async def test_a_rank_that_left_is_told_where_no_other_died(share: Share) -> None:
    share.ranks[1].ended.set_result(0)
    assert await share.first_end() == "rank dp=0 pp=0 tp=1 exited with status 0"


async def test_a_death_is_told_at_once(share: Share) -> None:
    share.ranks[1].ended.set_result(-9)
    async with asyncio.timeout(0.05):
        assert await share.first_end() == "rank dp=0 pp=0 tp=1 was killed by SIGKILL"


@pytest.mark.parametrize(("status", "died"), [(-9, True), (1, True), (70, False), (0, False)])
async def test_ranks_that_left_or_were_stuck_have_not_died(
    share: Share, status: int, *, died: bool
) -> None:
    share.ranks[2].ended.set_result(0)
    share.ranks[0].ended.set_result(status)
    assert await share.died() is died
