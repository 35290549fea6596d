"""A whole replica of torch engines in one process: a thread for each rank, driven as one engine.

Every call goes to all ranks at once and returns when all have returned; what they
collect must be the same.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from radixmesh.errors import MeshError
from tests.fakes.tensor_groups import ThreadPeers, thread_peers
from worker.config import RankConfig
from worker.engine.engine import EngineInfo, StepPlan, StepResult
from worker.engine.torch_engine import TorchEngine

T = TypeVar("T")

FLOAT32: dict[str, Any] = {"dtype": "float32", "threads": 1, "block_tokens": 8}


class TorchReplica:
    """Implements `engine.Engine` for all ranks together."""

    def __init__(self, engines: dict[tuple[int, int], TorchEngine]) -> None:
        self.engines = engines
        self._threads = {place: ThreadPoolExecutor(1) for place in engines}
        self._plans = 0

    @classmethod
    def load(
        cls, folder: Path, *, tp: int = 1, pp: int = 1, kv_tokens: int = 512, **changes: Any
    ) -> "TorchReplica":
        """Load all ranks of a model directory and reserve what each of them can hold."""
        peers = thread_peers(tp, pp)
        settings = {**FLOAT32, "kv_tokens": kv_tokens, "tp": tp, "pp": pp, **changes}
        engines = {}
        for stage, rank in product(range(pp), range(tp)):
            config = RankConfig(model_dir=str(folder), pp_rank=stage, tp_rank=rank, **settings)
            given: Any = peers[stage, rank]
            engines[stage, rank] = TorchEngine.load(config, given)
        replica = cls(engines)
        replica.reserve(min(engine.info.kv_blocks for engine in engines.values()))
        return replica

    @property
    def info(self) -> EngineInfo:
        (first, *others) = (engine.info for engine in self.engines.values())
        assert all(replace(other, kv_blocks=first.kv_blocks) == first for other in others)
        return first

    def peers(self, stage: int, rank: int) -> ThreadPeers:
        engine = self.engines[stage, rank]
        return ThreadPeers(engine._group, engine._stages)

    def reserve(self, kv_blocks: int) -> None:
        self._all(lambda engine: engine.reserve(kv_blocks))

    def launch(self, plan: StepPlan) -> None:
        # A digest of its own, so that ranks that get out of step are noticed.
        self._plans += 1
        marked = replace(plan, digest=self._plans)
        self._all(lambda engine: engine.launch(marked))

    def collect(self) -> StepResult:
        first, *others = self._all(lambda engine: engine.collect())
        # As text: NaN is not equal to itself.
        assert all(repr(other) == repr(first) for other in others)
        return first

    def read_weights(self, folder: Path) -> None:
        errors = self._all(lambda engine: _refusal(engine, folder))
        if refusals := [error for error in errors if error is not None]:
            raise refusals[0]

    def use_weights(self) -> None:
        self._all(lambda engine: engine.use_weights())

    def drop_weights(self) -> None:
        self._all(lambda engine: engine.drop_weights())

    def update_weights(self, folder: Path) -> None:
        """As the ranks do: all change, or none."""
        try:
            self.read_weights(folder)
        except MeshError:
            self.drop_weights()
            raise
        self.use_weights()

    def close(self) -> None:
        self._all(lambda engine: engine.close())
        for thread in self._threads.values():
            thread.shutdown()

    def _all(self, call: Callable[[TorchEngine], T]) -> list[T]:
        calls = [
            self._threads[place].submit(call, engine) for place, engine in self.engines.items()
        ]
        errors = [error for one in calls if (error := one.exception()) is not None]
        if errors:
            raise errors[0]
        return [one.result() for one in calls]


def _refusal(engine: TorchEngine, folder: Path) -> MeshError | None:
    try:
        engine.read_weights(folder)
    except MeshError as error:
        return error
    return None
