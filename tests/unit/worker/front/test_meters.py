"""What a worker counts, read as a scrape does, with ranks that the test plays."""

import asyncio

from prometheus_client import CollectorRegistry

from radixmesh.blocks import pack_ids
from tests.fakes.jobs import Nobody
from tests.fakes.jobs import group as make_group
from tests.fakes.scripted_ranks import Row, ScriptedLauncher
from worker.front.ask import Ask
from worker.front.crew import Crew
from worker.front.replica import ReplicaState
from worker.front.supervisor import Pace
from worker.request import LENGTH, Sampling, Started


async def test_no_more_of_a_resumed_request_is_reused_than_it_brought() -> None:
    registry = CollectorRegistry()
    group = make_group(registry=registry)
    launcher = ScriptedLauncher()
    async with asyncio.TaskGroup() as tasks:
        crew = tasks.create_task(Crew(group, launcher, Pace(), retire_grace_s=5).run())
        await group.changed.until(lambda: group.replicas[0].state is ReplicaState.UP)
        ranks = await launcher.incarnation(0, 0)
        resumed = Ask(
            prompt=pack_ids([5] * 4), output=pack_ids([6] * 28), sampling=Sampling(seed=1)
        )
        job = group.submit(Nobody(), 1, resumed)
        ranks.step([Row(job.request_id, 28, [7], LENGTH)], started=[Started(job.request_id, 16, 0)])
        await group.idle()
        crew.cancel()

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"radixmesh_worker_{name}", {"dp_rank": "0"})

    assert (value("cached_tokens_total"), value("prompt_tokens_total")) == (16, 32)
