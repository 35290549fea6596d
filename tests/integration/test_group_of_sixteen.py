"""A group of the shape that its flags name: a front, a fork server, one process for each rank."""

from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.fakes.oracle import oracle_output, ordinary_ids
from tests.fakes.router_end import attach
from tests.fakes.worker_front import free_port, front_process
from worker.group.topology import Topology

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]


def loads_torch(process: psutil.Process) -> bool:
    return any("libtorch" in mapped.path for mapped in process.memory_maps())


async def test_sixteen_ranks_bear_their_places_and_none_of_seventeen_processes_loads_torch(
    model_dir: Path,
) -> None:
    port = free_port()
    shape = ("--dp", "2", "--pp", "2", "--tp", "4")
    async with (
        front_process(model_dir, port, *shape) as front,
        attach(f"127.0.0.1:{port}") as router,
    ):
        await router.until_up(0, 1)
        processes = psutil.Process(front.pid).children(recursive=True)
        titles = Counter(" ".join(process.cmdline()).strip() for process in processes)
        places = [place for dp in (0, 1) for place in Topology(dp=2, pp=2, tp=4).replica(dp)]
        expected = [f"radixmesh-worker rank {place}" for place in places]
        assert titles == Counter([*expected, "radixmesh-worker forkserver"])
        assert len(expected) == 16
        assert not [each for each in (psutil.Process(front.pid), *processes) if loads_torch(each)]
        prompts = [[5 + at, 6, 7] for at in range(8)]
        outputs = [router.submit(one, max_tokens=20, dp_rank=one[0] % 2) for one in prompts]
        ordinary = ordinary_ids(model_dir)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert await output.result() == oracle_output(prompt, ordinary, 20)
