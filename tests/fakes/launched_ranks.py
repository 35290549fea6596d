"""One replica's real rank processes, started as a front does, with a blocking front's end."""

import asyncio
import threading
from types import TracebackType
from typing import Self

from tests.fakes.rank_threads import FrontEnd
from worker.config import RankConfig
from worker.node.launcher import RankLauncher
from worker.request import Ready


class LaunchedRanks:
    """Ranks that are ready; `close` ends and reaps them."""

    def __init__(self, base: RankConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._launcher = RankLauncher(base)
        starting = asyncio.run_coroutine_threadsafe(self._launcher(0, 1), self._loop)
        self._ranks = starting.result(30)
        self.front = FrontEnd(self._ranks.mailbox)
        ready = self.front.receive()
        assert isinstance(ready, Ready), ready
        self.ready = ready

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.front.close()
        asyncio.run_coroutine_threadsafe(self._ranks.end(5.0), self._loop).result(30)
        asyncio.run_coroutine_threadsafe(self._launcher.aclose(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
