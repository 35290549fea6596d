"""What a group is to be, and what it is once a rank has said what it can do.

Knows words and limits; knows neither replicas nor routers.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from radixmesh.errors import Draining, InternalError, NoReplicaReady
from worker.front.ask import GroupInfo
from worker.front.probes import ProbePace
from worker.request import Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """What is known of a group before any rank is ready."""

    model: str
    weight_version: str
    fingerprint: str
    engine: str
    dp: int
    pp: int
    tp: int
    max_running: int
    max_waiting: int
    max_batched_tokens: int
    dispatch: str
    probes: ProbePace

    def info(self, ready: Ready) -> GroupInfo:
        """Return the group's description, given what a rank reported."""
        return GroupInfo(
            model=self.model,
            weight_version=self.weight_version,
            fingerprint=self.fingerprint,
            engine=self.engine,
            dp=self.dp,
            pp=self.pp,
            tp=self.tp,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_batched_tokens=self.max_batched_tokens,
            block_tokens=ready.block_tokens,
            kv_blocks=ready.kv_blocks,
            max_model_len=min(ready.max_model_len, ready.kv_blocks * ready.block_tokens),
            vocab_size=ready.vocab_size,
            eos_ids=ready.eos_ids,
        )


class Description:
    """What a group is at the time. `on_change` is told of all that changes after the beginning."""

    def __init__(self, spec: GroupSpec, *, on_change: Callable[[], None]) -> None:
        self._spec = spec
        self._info: GroupInfo | None = None
        self._complete = asyncio.Event()
        self._on_change = on_change

    def __repr__(self) -> str:
        return f"Description({self._info or self._spec})"

    @property
    def known(self) -> bool:
        """Whether a rank of the group has ever been ready."""
        return self._info is not None

    @property
    def info(self) -> GroupInfo:
        """All of it. Raises NoReplicaReady while no rank has ever been ready."""
        if self._info is None:
            raise NoReplicaReady("the group is starting")
        return self._info

    @property
    def kv_blocks(self) -> int:
        """Blocks of one replica; 0 while that is not known."""
        return self._info.kv_blocks if self._info else 0

    async def complete(self) -> None:
        """Wait until a rank has been ready once.

        Raises:
            Draining: None ever will be.
        """
        await self._complete.wait()
        if self._info is None:
            raise Draining("the group ended before it was ready")

    def end(self) -> None:
        """Refuse whoever still waits for a rank to be ready."""
        self._complete.set()

    def learn(self, ready: Ready) -> None:
        """Take over what a rank can do.

        Raises:
            InternalError: It differs from what the group has announced.
        """
        info = self._spec.info(ready)
        if self._info is not None and info != self._info:
            raise InternalError("the rank's limits differ from those of the group")
        self._info = info
        self._complete.set()

    def scale(self, dp: int) -> None:
        """There are so many replicas from now on."""
        self._change(replace(self._spec, dp=dp))

    def reload(self, weight_version: str) -> None:
        """The weights are others from now on."""
        self._change(replace(self._spec, weight_version=weight_version))

    def _change(self, spec: GroupSpec) -> None:
        self._spec = spec
        if self._info is not None:
            self._info = replace(self._info, dp=spec.dp, weight_version=spec.weight_version)
            self._on_change()
