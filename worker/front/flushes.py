"""Orders to empty caches that replicas have not answered yet. Knows replicas and tokens only."""

import asyncio
import itertools

from radixmesh.errors import MeshError
from worker.front.replica import Replica


class Flushes:
    """What each order waits for. Every order ends: by an answer, or with its replica."""

    def __init__(self) -> None:
        self._tokens = itertools.count(1)
        self._open: dict[int, tuple[Replica, asyncio.Future[int]]] = {}

    def order(self, replica: Replica) -> asyncio.Future[int]:
        """Have a replica's cache emptied; the result is how many blocks left it.

        Raises:
            GroupLost: The replica is down.
        """
        token = next(self._tokens)
        replica.flush(token)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[token] = (replica, future)
        return future

    def answer(self, token: int, removed: int) -> None:
        """A replica emptied its cache; a token that nobody waits for is ignored."""
        _, future = self._open.pop(token, (None, None))
        if future is not None and not future.done():
            future.set_result(removed)

    def fail(self, replica: Replica, error: MeshError) -> None:
        """A replica is gone, and its answers with it."""
        for token, (asked, future) in list(self._open.items()):
            if asked is replica:
                del self._open[token]
                if not future.done():
                    future.set_exception(error)
