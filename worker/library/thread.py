"""The thread that holds a group: starts it, carries calls to it, and ends it with its ranks.

Ranks die with the thread that started them, so the thread lives as long as the
group. Its methods may be called from any other thread; knows no prompts.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry

from radixmesh.errors import (
    Draining,
    GroupLost,
    InternalError,
    InvalidRequest,
    MeshError,
    NoReplicaReady,
)
from worker.front.ask import GroupInfo
from worker.front.assembly import make_group, running
from worker.front.group import Group
from worker.front.replica import ReplicaState
from worker.front.supervisor import CannotStart, GroupEnded, Launch
from worker.library.desk import Desk
from worker.library.run import Run
from worker.settings import WorkerSettings

_T = TypeVar("_T")

_CLOSED: Final = "the engine is closed"


class GroupThread:
    """A group on an event loop of its own. `launch` as of `assembly.running`."""

    def __init__(
        self, settings: WorkerSettings, model_dir: Path, launch: Launch | None = None
    ) -> None:
        self._settings = settings
        self._model_dir = model_dir
        self._launch = launch
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._started: Future[tuple[Group, Desk]] = Future()
        # Never joined by the interpreter, which would wait for it before it closes anything.
        self._thread = threading.Thread(target=self._run, name="radixmesh-engine", daemon=True)
        self._lock = threading.RLock()  # again from `close`, when an engine is collected within
        self._over: MeshError | None = None  # guarded by the lock
        self._held: Group | None = None  # these two belong to the loop
        self._stopping = False

    def start(self) -> None:
        """Start, and wait until every replica takes requests.

        Raises:
            InvalidRequest: The ranks refuse their configuration.
            NoReplicaReady: They were not ready in time.
            GroupLost: They failed again and again.
        """
        self._thread.start()
        self._started.result()

    def close(self) -> None:
        """End every run and every rank; return when they are gone. May be called again."""
        if os.getpid() != self._pid or not self._thread.ident:
            return  # a forked child has neither the thread nor the ranks
        with self._lock:
            if self._over is None:
                self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def info(self) -> GroupInfo:
        """What the group is."""
        return self._group.info

    def begin(self, runs: Sequence[Run]) -> None:
        """Begin runs; each is told its end on the group's loop.

        Raises:
            Draining: The engine is closed.
            MeshError: It has failed; why.
        """
        self._post(self._desk.begin, runs)

    def cancel(self, runs: Sequence[Run]) -> None:
        """Give up the runs that are not over."""
        with suppress(MeshError):  # closed: they have ended with it
            self._post(self._desk.cancel, runs)

    def call(self, make: Callable[[Group], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine on the group's loop and wait for its result.

        Raises:
            MeshError: What the coroutine raises, or as `begin`.
        """
        with self._open():
            future = asyncio.run_coroutine_threadsafe(make(self._group), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Draining(_CLOSED) from None

    @property
    def _group(self) -> Group:
        return self._started.result()[0]

    @property
    def _desk(self) -> Desk:
        return self._started.result()[1]

    def _post(self, function: Callable[..., object], *args: object) -> None:
        with self._open():
            self._loop.call_soon_threadsafe(function, *args)

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Hold the engine open: what is posted within is run before the loop ends."""
        if os.getpid() != self._pid:
            raise InternalError("an engine can't be used in a forked process")
        if threading.current_thread() is self._thread:
            raise InternalError("an engine can't be used from its own thread")
        with self._lock:
            if self._over is not None:
                raise type(self._over)(self._over.message)
            yield

    # On the thread.

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        error: MeshError = Draining(_CLOSED)
        try:
            group = make_group(self._settings, self._model_dir, CollectorRegistry())
            self._held = group
            desk = Desk(group)
            async with running(group, self._settings, self._model_dir, self._launch) as missing:
                error = await self._serve(group, desk, missing)
                self._end(error)
        except GroupEnded as end:
            error = _meaning(end)
        except Exception as fault:  # noqa: BLE001  # raised where the engine is used
            error = InternalError(f"the engine broke: {fault!r}")
            error.__cause__ = fault
        self._end(error)
        # Runs that were posted meanwhile are told.
        await asyncio.sleep(0)

    async def _serve(self, group: Group, desk: Desk, missing: Callable[[], list[int]]) -> MeshError:
        def started() -> bool:
            return self._stopping or all(each.state is ReplicaState.UP for each in group.replicas)

        def stopped() -> bool:
            desk.on_change()
            return self._stopping

        startup_s = self._settings.startup_timeout_s
        try:
            async with asyncio.timeout(startup_s):
                await group.changed.until(started)
        except TimeoutError:
            why = _waits_for(group, missing())
            return NoReplicaReady(f"the replicas were not ready in {startup_s:g} s: {why}")
        if not self._stopping:
            self._started.set_result((group, desk))
            await group.changed.until(stopped)
        return Draining(_CLOSED)

    def _stop(self) -> None:
        self._stopping = True
        if self._held is not None:
            self._held.changed.tell()

    def _end(self, error: MeshError) -> None:
        with self._lock:
            if self._over is not None:
                return
            self._over = error
        if self._started.done():
            self._desk.end(error)
        else:
            self._started.set_exception(error)


def _waits_for(group: Group, missing: list[int]) -> str:
    if missing:
        return f"waiting for nodes {', '.join(map(str, missing))}"
    late = [each.dp_rank for each in group.replicas if each.state is not ReplicaState.UP]
    return f"waiting for the ranks of replicas {', '.join(map(str, late))}"


def _meaning(end: GroupEnded) -> MeshError:
    kind = InvalidRequest if isinstance(end, CannotStart) else GroupLost
    error = kind(str(end))
    error.__cause__ = end
    return error
