"""Rank processes that were not told the same: a typed end within 5 s, both plans in the log.

With the deadlines that ranks have by default, over both carriers, with and without stages.
"""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from radixmesh.blocks import Namespace, pack_ids
from tests.fakes.forks import ForkedRanks, Forks
from worker.config import FakeConfig, RankConfig
from worker.request import Add, Ready, Sampling

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(30)]

ENDLESS = Sampling(seed=1, max_tokens=1000, ignore_eos=True)
PLANS = re.compile(r"(plans differ|planned last) .*plans='([^']*)'")


class Scene:
    """A fork server for all tests, and what its ranks have logged in this one."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self._config = RankConfig(model_dir=str(model_dir), engine="fake")
        self._path = folder / "log"
        self._file = self._path.open("wb")
        # Ranks by gloo need more than the others.
        self._forks = Forks(msgspec.structs.replace(self._config, carrier="gloo"), self._file)
        self._seen = 0

    def start(self, fault: str, values: dict[str, Any]) -> ForkedRanks:
        self._seen = self._path.stat().st_size
        fake = FakeConfig(faults=(fault,))
        ranks = ForkedRanks(self._forks, msgspec.structs.replace(self._config, fake=fake, **values))
        assert isinstance(ranks.front.receive(), Ready)
        return ranks

    def plans(self) -> list[tuple[str, list[str]]]:
        """What each rank said of its last plans: how, and one text for each step."""
        told = self._path.read_bytes()[self._seen :].decode()
        return [(how, plans.split("; ")) for how, plans in PLANS.findall(told)]

    def close(self) -> None:
        self._forks.close()
        self._file.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path_factory.mktemp("divergence"), model_dir)
    yield scene
    scene.close()


@pytest.fixture
def start(scene: Scene) -> Iterator[Callable[..., ForkedRanks]]:
    running: list[ForkedRanks] = []

    def starter(fault: str, **values: Any) -> ForkedRanks:
        running.append(scene.start(fault, values))
        return running[-1]

    yield starter
    for ranks in running:
        for process in ranks.processes:
            process.kill()
        ranks.close()


def last_word(ranks: ForkedRanks) -> str:
    """Submit requests; return why the replica ended, within 5 s."""
    namespace = Namespace(model="tiny").encode()
    began = time.monotonic()
    adds = (
        Add(number, pack_ids([20, 20 + number]), b"", ENDLESS, namespace) for number in range(1, 6)
    )
    ranks.front.send(*adds)
    reason = ranks.front.last_word().reason
    assert time.monotonic() - began < 5
    return reason


@pytest.mark.parametrize("carrier", ["local", "gloo"])
@pytest.mark.parametrize(
    ("shape", "where"),
    [({"tp": 2}, "tp=1"), ({"tp": 2, "overlap": True}, "tp=1"), ({"pp": 2}, "pp=1")],
)
@pytest.mark.parametrize("kind", ["drop", "alter", "reorder"])
def test_a_rank_that_was_told_another_request_ends_its_replica_with_both_plans_in_the_log(
    scene: Scene,
    start: Callable[..., ForkedRanks],
    carrier: str,
    shape: dict[str, Any],
    where: str,
    kind: str,
) -> None:
    ranks = start(f"{kind}@request=2:{where}", carrier=carrier, **shape)
    assert last_word(ranks) == "RANK_DESYNC"
    statuses = [process.wait() for process in ranks.processes]
    assert statuses[0] == 1
    told = scene.plans()
    [ours] = [plans for how, plans in told if how == "plans differ"]
    [theirs] = [plans for how, plans in told if how == "planned last"]
    steps = {plan.split()[0] for plan in ours} & {plan.split()[0] for plan in theirs}
    assert steps, "the same step of both"
    assert set(ours) != set(theirs)


@pytest.mark.parametrize("carrier", ["local", "gloo"])
@pytest.mark.parametrize(("shape", "where"), [({"tp": 2}, "tp=1"), ({"pp": 2}, "pp=1")])
def test_a_rank_that_misses_a_step_ends_its_replica_with_both_plans_in_the_log(
    scene: Scene,
    start: Callable[..., ForkedRanks],
    carrier: str,
    shape: dict[str, Any],
    where: str,
) -> None:
    ranks = start(f"skip@step=3:{where}", carrier=carrier, **shape)
    word = last_word(ranks)
    assert word in {"RANK_DESYNC", "GROUP_LOST"}
    statuses = [process.wait() for process in ranks.processes]
    assert statuses[0] == (0 if word == "GROUP_LOST" else 1)
    told = [plans[-1].split()[0] for _, plans in scene.plans()]
    assert len(told) == 2
    assert "2" in told, "the rank that missed step 3"
