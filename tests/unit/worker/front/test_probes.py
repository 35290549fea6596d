"""How long an answer is due: only time in which this process could have heard it counts."""

import asyncio
from functools import partial

import pytest

from radixmesh.errors import GroupLost, MeshError
from worker.front.controls import Controls
from worker.front.probes import ProbePace, Probes
from worker.front.replica import Replica
from worker.request import Answer, Inbound, Probe, Weights

PACE = ProbePace(interval_s=5, timeout_s=15, give_up_s=60, reading_s=600)


class Scene:
    """One replica that is up, and its probes."""

    def __init__(self) -> None:
        self.sent: list[Inbound] = []
        self.broken: list[MeshError] = []
        self.silent = 0
        self.heard = 0
        self.longest_s = 0.0
        self.replica = Replica(0)
        self.controls = Controls()
        self.probes = Probes(
            self.controls,
            PACE,
            on_silent=self._on_silent,
            on_heard=self._on_heard,
            clock=lambda: self.now,
        )
        self.now = 100.0
        self.begin()

    def begin(self) -> None:
        self.replica.begin(1, self, self.broken.append)
        self.replica.set_up(free_blocks=9)

    def send(self, message: Inbound) -> None:
        self.sent.append(message)

    def _on_silent(self, replica: Replica) -> None:
        self.silent += 1

    def _on_heard(self, replica: Replica, seconds: float) -> None:
        self.heard += 1
        self.longest_s = max(self.longest_s, seconds)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds)):
            self.now += 1
            self.probes.tick([self.replica])

    def answer(self) -> None:
        message = self.sent[-1]
        assert isinstance(message, Probe)
        self.controls.answer(Answer(message.token))


@pytest.fixture
async def scene() -> Scene:
    return Scene()


async def settle() -> None:
    """Let callbacks of futures run."""
    await asyncio.sleep(0)


async def test_a_replica_that_answers_is_asked_once_every_interval(scene: Scene) -> None:
    for _ in range(60):
        scene.pass_time(1)
        if len(scene.sent) > scene.heard:
            scene.answer()
            await settle()
    assert len(scene.sent) == 12
    assert scene.silent == 0
    assert not scene.broken


async def test_a_question_without_answer_costs_readiness_first_and_the_life_later(
    scene: Scene,
) -> None:
    scene.pass_time(1 + 15)
    assert scene.silent == 0
    scene.pass_time(1)
    assert scene.silent >= 1
    scene.pass_time(60 - 16)
    assert not scene.broken
    scene.pass_time(1)
    assert isinstance(scene.broken[0], GroupLost)
    assert len(scene.sent) == 1


async def test_how_long_an_answer_took_is_told(scene: Scene) -> None:
    scene.pass_time(1)
    scene.pass_time(7)
    scene.answer()
    await settle()
    assert scene.longest_s == 7


async def test_time_in_which_this_process_stood_still_is_nobody_s_silence(scene: Scene) -> None:
    scene.pass_time(1)
    scene.now += 3_600
    scene.pass_time(1)
    assert scene.silent == 0
    assert not scene.broken


async def test_the_next_life_is_judged_by_its_own_answers(scene: Scene) -> None:
    scene.pass_time(40)
    error = GroupLost("killed")
    scene.replica.lose()
    scene.controls.fail(scene.replica, error)
    await settle()
    scene.begin()
    silent = scene.silent
    scene.pass_time(15)
    assert scene.silent == silent
    assert len(scene.sent) == 2


def read(scene: Scene) -> asyncio.Future[int]:
    return scene.controls.order(scene.replica, partial(Weights, folder="/next", version="2"))


async def test_a_replica_that_reads_weights_is_not_asked_and_keeps_its_life(scene: Scene) -> None:
    scene.pass_time(1)
    reading = read(scene)
    scene.pass_time(600)
    assert not scene.silent
    assert not scene.broken
    probe, weights = scene.sent
    assert isinstance(probe, Probe)
    assert isinstance(weights, Weights)
    # The question that came before has the rest of its time, not that of the reading.
    scene.controls.answer(Answer(weights.token))
    await reading
    scene.pass_time(15)
    assert not scene.silent
    scene.controls.answer(Answer(probe.token))
    await settle()
    assert scene.heard == 1


async def test_a_replica_that_reads_weights_for_ever_is_given_up(scene: Scene) -> None:
    scene.pass_time(1)
    reading = read(scene)
    reading.cancel()  # who asked has left, the ranks read on
    scene.pass_time(600)
    assert not scene.broken
    scene.pass_time(1)
    assert isinstance(scene.broken[0], GroupLost)
    assert "has read new weights for 601 s" in scene.broken[0].message


@pytest.mark.parametrize("seconds", [0.02, 0.5, 5.0])
def test_every_time_is_kept_to_a_fraction_of_itself(seconds: float) -> None:
    pace = ProbePace(interval_s=seconds, timeout_s=seconds, give_up_s=seconds, reading_s=seconds)
    assert pace.tick_s <= max(seconds / 2, 1.0)
    assert pace.tick_s <= 1.0
