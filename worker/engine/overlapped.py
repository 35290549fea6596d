"""Computes another engine's steps in a thread of its own: the next one is planned meanwhile.

The plan of a step may hold futures: ids that the step before is still to draw. They are
put in here, between the two. Knows no scheduler; the same steps give the same results as
without it.
"""

import threading
from pathlib import Path
from queue import SimpleQueue

from worker.engine.engine import Engine, EngineInfo, StepPlan, StepResult
from worker.engine.futures import resolve

_NOTHING = StepResult(ids=[], logprobs=[])


class Overlapped:
    """An engine whose `launch` returns at once. `close` ends its thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread = threading.Thread(target=self._compute, name="engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Overlapped {self._engine!r}>"

    @property
    def info(self) -> EngineInfo:
        """What the engine can take."""
        return self._engine.info

    def reserve(self, kv_blocks: int) -> None:
        """Make the KV cache, and run once."""
        self._engine.reserve(kv_blocks)

    def launch(self, plan: StepPlan) -> None:
        """Have the step computed after those that were launched before."""
        self._plans.put(plan)

    def collect(self) -> StepResult:
        """Wait for the oldest step's result; what broke the engine is raised here."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def read_weights(self, folder: Path) -> None:
        """Read other weights; no step is under way. Raises InvalidRequest or NotSupported."""
        self._engine.read_weights(folder)

    def use_weights(self) -> None:
        """Compute with what was read."""
        self._engine.use_weights()

    def drop_weights(self) -> None:
        """Forget what was read."""
        self._engine.drop_weights()

    def close(self) -> None:
        """Finish what was launched, then free all."""
        self._plans.put(None)
        self._thread.join()
        self._engine.close()

    def _compute(self) -> None:
        drawn = _NOTHING
        while (plan := self._plans.get()) is not None:
            try:
                self._engine.launch(resolve(plan, drawn))
                drawn = self._engine.collect()
            except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
                self._results.put(error)
                return
            self._results.put(drawn)
