"""Who waits for a replica of a model. Knows models and whether they can take work; no replica.

Interrupted streams are woken before new work, and no more of them than fit.
"""

import asyncio
from collections import deque
from collections.abc import Callable


class Waiters:
    """Requests that found no replica.

    Args:
        room: Returns how many interrupted streams a model could take now, and whether
            it could take new work.
    """

    def __init__(self, room: Callable[[str], tuple[int, bool]]) -> None:
        self._room = room
        self._resumes: dict[str, deque[asyncio.Future[None]]] = {}
        self._news: dict[str, deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        queues = [*self._resumes.values(), *self._news.values()]
        return sum(1 for queue in queues for waiter in queue if not waiter.done())

    async def wait(self, model: str, *, resume: bool) -> None:
        """Return when the model can take one more of this kind."""
        queues = self._resumes if resume else self._news
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue = queues.setdefault(model, deque())
        queue.append(waiter)
        self._wake_model(model)
        try:
            await waiter
        finally:
            if waiter in queue:
                queue.remove(waiter)
            if not queue and queues.get(model) is queue:
                del queues[model]

    def wake(self) -> None:
        """Something changed: wake those whose model can take them."""
        for model in {*self._resumes, *self._news}:
            self._wake_model(model)

    def _wake_model(self, model: str) -> None:
        room, open_to_all = self._room(model)
        resumes = self._resumes.get(model, deque())
        for waiter in list(resumes)[:room]:
            self._release(resumes, waiter)
        # New work goes only when no interrupted stream is left behind.
        if open_to_all and not resumes:
            news = self._news.get(model, deque())
            for waiter in list(news):
                self._release(news, waiter)

    @staticmethod
    def _release(queue: deque[asyncio.Future[None]], waiter: asyncio.Future[None]) -> None:
        queue.remove(waiter)
        if not waiter.done():
            waiter.set_result(None)
