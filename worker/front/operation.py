"""What all replicas of a group are told to do together: pause, go on, change their weights.

One thing at a time. Knows replicas, controls and holds; knows neither requests nor routers.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from radixmesh.errors import GroupLost, InvalidRequest, MeshError, NoReplicaReady
from worker.front.controls import Controls, Make
from worker.front.replica import Hold, LoadedWeights, Replica
from worker.front.roster import Roster
from worker.request import Pause, Weights

logger = logging.getLogger(__name__)

# By dp_rank: None where it was done, else why not.
Outcomes = dict[int, MeshError | None]


class Operation:
    """Operates one group. `describe` is told the version when the group's weights changed."""

    def __init__(
        self,
        roster: Roster,
        controls: Controls,
        *,
        weight_version: str,
        describe: Callable[[str], None],
    ) -> None:
        self._roster = roster
        self._controls = controls
        self._weights = LoadedWeights("", weight_version)
        self._describe = describe
        self._lock = asyncio.Lock()

    async def pause(self) -> Outcomes:
        """Have nothing computed until `resume`; requests keep their places, new ones are refused.

        A replica that starts meanwhile is paused too.
        """
        async with self._lock:
            # Together, so that a replica that comes up is told either by this or by its start.
            self._roster.hold_all(Hold.PAUSED)
            answers = self._order(self._roster.up, partial(Pause, paused=True))
            return await _outcomes(answers)

    async def resume(self) -> Outcomes:
        """Go on after `pause`."""
        async with self._lock:
            self._roster.release_all(Hold.PAUSED)
            answers = self._order(self._roster.up, partial(Pause, paused=False))
            return await _outcomes(answers)

    async def update_weights(self, folder: str, version: str) -> Outcomes:
        """Compute with the weights in a directory from now on.

        New requests are refused meanwhile; running ones are computed anew with the new
        weights and go on. One replica tries first: what it refuses, none is told. Another
        one that fails then is started anew, and starts with the new weights.

        Raises:
            NoReplicaReady: No replica is up.
            InvalidRequest, NotSupported: The weights don't fit, or the version is none or the
                one in use; nothing has changed.
            GroupLost: The replica that tried them was lost; nothing has changed.
        """
        async with self._lock:
            self._check_version(version)
            self._roster.hold_all(Hold.RELOADING)
            try:
                return await self._update(LoadedWeights(folder, version))
            finally:
                self._roster.release_all(Hold.RELOADING)

    def _check_version(self, version: str) -> None:
        # It is all that tells outputs and cached blocks of one set of weights from another's.
        if not version:
            raise InvalidRequest("version: must not be empty", field="version")
        if version == self._weights.version:
            raise InvalidRequest(
                f"version: {version!r} is in use, so outputs could not be told apart",
                field="version",
            )

    async def _update(self, weights: LoadedWeights) -> Outcomes:
        up = self._roster.up
        if not up:
            raise NoReplicaReady("no replica is up")
        first, *others = up
        make = partial(Weights, folder=weights.folder, version=weights.version)
        await self._controls.order(first, make, then=partial(self._adopt, first, weights))
        outcomes = await _outcomes(self._order(others, make, weights))
        self._renew()
        logger.info("weights changed", extra={"version": weights.version, "replicas": len(up)})
        return {first.dp_rank: None, **outcomes}

    def _adopt(self, first: Replica, weights: LoadedWeights) -> None:
        # What starts from now on starts with these, and what was told otherwise is found.
        self._weights = first.weights = weights
        self._describe(weights.version)

    async def prepare(self, replica: Replica) -> None:
        """Have ranks that just started compute with what the group computes with now.

        Raises:
            MeshError: They can't.
        """
        weights = self._weights
        if weights.folder:
            make = partial(Weights, folder=weights.folder, version=weights.version)
            await self._controls.order(replica, make)
        replica.weights = weights

    def on_up(self, replica: Replica) -> None:
        """Pause a replica that came up in a paused group, before it is given anything."""
        if self._roster.held(Hold.PAUSED):
            told = self._controls.order(replica, partial(Pause, paused=True))
            told.add_done_callback(lambda answer: answer.exception())  # its loss is told otherwise

    def is_current(self, replica: Replica) -> bool:
        """Whether it computes with the group's weights."""
        return replica.weights is self._weights

    def tick(self) -> None:
        """Find replicas that a change of weights did not reach, as who asked for it left."""
        if not self._roster.held(Hold.RELOADING):
            self._renew()

    def _renew(self) -> None:
        for replica in self._roster.up:
            if not self.is_current(replica):
                replica.give_up(GroupLost("the replica missed a change of weights"))

    def _order(
        self, replicas: Sequence[Replica], make: Make, weights: LoadedWeights | None = None
    ) -> dict[int, asyncio.Future[int] | MeshError]:
        answers: dict[int, asyncio.Future[int] | MeshError] = {}
        for replica in replicas:
            then = partial(_take, replica, weights)
            try:
                answers[replica.dp_rank] = self._controls.order(replica, make, then=then)
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
