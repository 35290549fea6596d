"""What replicas were told to do and have not answered yet. Knows replicas and tokens only."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass

from radixmesh.errors import BY_REASON, InternalError, MeshError
from worker.front.replica import Replica
from worker.request import Answer, Control, Weights

# Makes a control that is answered under a token.
Make = Callable[[int], Control]


@dataclass(frozen=True, slots=True)
class _Order:
    replica: Replica
    control: Control
    answer: asyncio.Future[int]
    then: Callable[[], None]


class Controls:
    """What each control waits for. Every one ends: by an answer, or with its replica."""

    def __init__(self) -> None:
        self._tokens = itertools.count(1)
        self._open: dict[int, _Order] = {}

    def __repr__(self) -> str:
        return f"Controls({len(self._open)} open)"

    def order(
        self, replica: Replica, make: Make, *, then: Callable[[], None] = lambda: None
    ) -> asyncio.Future[int]:
        """Tell a replica's ranks; the result is the number that they answer.

        The future fails with the error that they answer, or with the end of the replica.
        `then` is called when they did it, before anything that they say later is heard.

        Raises:
            GroupLost: The replica is down.
            QueueFull: It does not read.
        """
        token = next(self._tokens)
        control = make(token)
        replica.tell(control)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._open[token] = _Order(replica, control, future, then)
        return future

    def reads_weights(self, replica: Replica) -> bool:
        """Whether the replica was told to read weights and has not answered, so says nothing."""
        return any(
            order.replica is replica and isinstance(order.control, Weights)
            for order in self._open.values()
        )

    def answer(self, answer: Answer) -> None:
        """A replica answered; a token that nobody waits for is ignored."""
        order = self._open.pop(answer.token, None)
        if order is None:
            return
        if answer.reason:
            kind = BY_REASON.get(answer.reason, InternalError)
            _fail(order.answer, kind(answer.message))
            return
        order.then()
        if not order.answer.done():
            order.answer.set_result(answer.number)

    def fail(self, replica: Replica, error: MeshError) -> None:
        """A replica is gone, and its answers with it."""
        for token, order in list(self._open.items()):
            if order.replica is replica:
                del self._open[token]
                _fail(order.answer, error)


def _fail(answer: asyncio.Future[int], error: MeshError) -> None:
    # One that was cancelled is done: who asked has left.
    if not answer.done():
        answer.set_exception(error)
