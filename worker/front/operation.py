"""What all replicas of a group are told to do together: pause, go on, change their weights.

One thing at a time. Knows replicas, controls and holds; knows neither requests nor routers.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from radixmesh.errors import GroupLost, MeshError, NoReplicaReady
from worker.front.controls import Make
from worker.front.replica import Hold, LoadedWeights, Replica, ReplicaState
from worker.request import Pause, Weights

logger = logging.getLogger(__name__)

# By dp_rank: None where it was done, else why not.
Outcomes = dict[int, MeshError | None]


class Operated(Protocol):
    """A group, as far as it is operated from here."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All of them."""
        ...

    def control(
        self, replica: Replica, make: Make, *, then: Callable[[], None] = ...
    ) -> asyncio.Future[int]:
        """Tell a replica's ranks something."""
        ...

    def hold(self, hold: Hold) -> None:
        """Take no new work, for this reason too."""
        ...

    def release(self, hold: Hold) -> None:
        """This reason is gone."""
        ...

    def adopt(self, weights: LoadedWeights) -> None:
        """From now on the group computes with these weights."""
        ...


class Operation:
    """Operates one group."""

    def __init__(self, group: Operated) -> None:
        self._group = group
        self._lock = asyncio.Lock()

    async def pause(self) -> Outcomes:
        """Have nothing computed until `resume`; requests keep their places, new ones are refused.

        A replica that starts meanwhile is paused too.
        """
        async with self._lock:
            # Together, so that a replica that comes up is told either by this or by its start.
            self._group.hold(Hold.PAUSED)
            answers = self._order(self._up(), partial(Pause, paused=True))
            return await _outcomes(answers)

    async def resume(self) -> Outcomes:
        """Go on after `pause`."""
        async with self._lock:
            self._group.release(Hold.PAUSED)
            answers = self._order(self._up(), partial(Pause, paused=False))
            return await _outcomes(answers)

    async def update_weights(self, folder: str, version: str) -> Outcomes:
        """Compute with the weights in a directory from now on.

        New requests are refused meanwhile; running ones are computed anew with the new
        weights and go on. One replica tries first: what it refuses, none is told. Another
        one that fails then is started anew, and starts with the new weights.

        Raises:
            NoReplicaReady: No replica is up.
            InvalidRequest, NotSupported: The weights don't fit; nothing has changed.
            GroupLost: The replica that tried them was lost; nothing has changed.
        """
        async with self._lock:
            self._group.hold(Hold.RELOADING)
            try:
                return await self._update(LoadedWeights(folder, version))
            finally:
                self._group.release(Hold.RELOADING)

    async def _update(self, weights: LoadedWeights) -> Outcomes:
        up = self._up()
        if not up:
            raise NoReplicaReady("no replica is up")
        first, *others = up
        make = partial(Weights, folder=weights.folder, version=weights.version)
        await self._group.control(first, make, then=lambda: self._adopt(first, weights))
        outcomes = await _outcomes(self._order(others, make, weights))
        for replica in others:
            error = outcomes[replica.dp_rank]
            if error is not None:
                replica.give_up(GroupLost(f"the new weights could not be taken: {error.message}"))
        logger.info("weights changed", extra={"version": weights.version, "replicas": len(up)})
        return {first.dp_rank: None, **outcomes}

    def _adopt(self, first: Replica, weights: LoadedWeights) -> None:
        first.weights = weights
        self._group.adopt(weights)

    def _up(self) -> list[Replica]:
        return [each for each in self._group.replicas if each.state is not ReplicaState.DOWN]

    def _order(
        self, replicas: Sequence[Replica], make: Make, weights: LoadedWeights | None = None
    ) -> dict[int, asyncio.Future[int] | MeshError]:
        answers: dict[int, asyncio.Future[int] | MeshError] = {}
        for replica in replicas:
            then = partial(_take, replica, weights)
            try:
                answers[replica.dp_rank] = self._group.control(replica, make, then=then)
            except MeshError as error:
                answers[replica.dp_rank] = error
        return answers


def _take(replica: Replica, weights: LoadedWeights | None) -> None:
    if weights is not None:
        replica.weights = weights


async def _outcomes(answers: dict[int, asyncio.Future[int] | MeshError]) -> Outcomes:
    outcomes: Outcomes = {}
    for dp_rank, answer in answers.items():
        outcomes[dp_rank] = None
        try:
            if isinstance(answer, MeshError):
                raise answer
            await answer
        except MeshError as error:
            outcomes[dp_rank] = error
    return outcomes
