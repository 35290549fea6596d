"""One request's leave to run: the places, tokens and rates that it holds, until it ends.

Knows what was taken and gives exactly that back; no wire, nothing of what a request says.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from radixmesh.errors import DeadlineExceeded, QueueFull, RateLimited
from router.edge.places import Places
from router.edge.tenants import Account, Bucket


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told: the seconds that an admitted request waited; a refusal's reason and cause."""

    admitted: Callable[[float], object] = lambda _: None
    refused: Callable[[str, str], object] = lambda _, __: None


class Permit:
    """What one request holds. `enter` once, `take_tokens` at most once, then `leave`.

    Args:
        requests: Places for requests.
        tokens: Places for tokens.
        account: The tenant's; None when it has no limit.
        priority: Class in both lines.
        queue_timeout_s: Seconds that it may wait, in both lines together.
        told: Who is told how it goes.
    """

    def __init__(
        self,
        requests: Places,
        tokens: Places,
        account: Account | None,
        *,
        priority: int,
        queue_timeout_s: float,
        told: Told,
    ) -> None:
        self._requests = requests
        self._tokens = tokens
        self._account = account or Account(None, None)
        self._priority = priority
        self._patience_s = queue_timeout_s
        self._told = told
        self._asked_for_tokens = False
        self._held_tokens = 0
        self._reserved = 0
        self._used: Callable[[], int] = lambda: 0
        self._waited_s = 0.0

    def __repr__(self) -> str:
        return f"<Permit {self._held_tokens} tokens, waited {self._waited_s:.3f} s>"

    async def enter(self, timeout_s: float) -> None:
        """Hold a place for the request.

        Args:
            timeout_s: Seconds until the request's deadline.

        Raises:
            QueueFull: The line is full, or the wait in it was too long.
            RateLimited: The tenant has used up its requests or its tokens.
            DeadlineExceeded: The deadline came first.
        """
        account, now = self._account, _now()
        with self._refusals():
            # An empty bucket is said before anything is done for the request.
            _require(account.tokens, 1, "tokens", now)
            _require(account.requests, 1, "requests", now)
        if account.requests is not None:
            account.requests.take(1, now)
        with self._refusals(counted=True):
            await self._wait(self._requests, 1, timeout_s)

    async def take_tokens(self, most: int, used: Callable[[], int]) -> None:
        """Hold tokens, too.

        Args:
            most: What the request may use: its prompt ids, and what all of its outputs
                may have at most.
            used: Says, when the permit ends, what it has used.

        Raises:
            QueueFull: The line is full, or the wait in it was too long.
            RateLimited: The tenant has used up its tokens.
        """
        self._asked_for_tokens = True
        with self._refusals(counted=True):
            bucket = self._account.tokens
            _require(bucket, most, "tokens", _now())
            if bucket is not None:
                bucket.take(most, _now())
                self._reserved = most
            self._used = used
            await self._wait(self._tokens, most, float("inf"))
        self._held_tokens = most
        self._told.admitted(self._waited_s)

    def leave(self) -> None:
        """Give everything back."""
        if not self._asked_for_tokens:
            self._told.admitted(self._waited_s)
        if self._account.tokens is not None and self._reserved:
            self._account.tokens.give_back(self._reserved - self._used(), _now())
        # Tokens first: whoever gets the place may want them.
        if self._held_tokens:
            self._tokens.give_back(self._held_tokens)
        self._requests.give_back(1)

    async def _wait(self, places: Places, units: int, timeout_s: float) -> None:
        began, patience_s = _now(), max(0.0, self._patience_s - self._waited_s)
        try:
            await places.take(units, priority=self._priority, timeout_s=min(timeout_s, patience_s))
        except TimeoutError:
            if timeout_s < patience_s:
                raise DeadlineExceeded("the deadline passed in the queue") from None
            raise places.refusal("the wait in the queue was too long", "timeout", units) from None
        finally:
            self._waited_s += _now() - began

    @contextmanager
    def _refusals(self, *, counted: bool = False) -> Iterator[None]:
        """Tell of a refusal; who was refused has not used a request of the tenant's."""
        try:
            yield
        except (QueueFull, RateLimited) as error:
            if counted and self._account.requests is not None:
                self._account.requests.give_back(1, _now())
            self._told.refused(error.reason, error.metadata["cause"])
            raise


def _require(bucket: Bucket | None, amount: int, what: str, now: float) -> None:
    if bucket is None:
        return
    wait_s = bucket.wait_s(amount, now)
    if wait_s > 0:
        raise RateLimited(
            f"the tenant has used up its {what} of this minute",
            field="tenant",
            retry_after_s=wait_s,
            cause=f"tenant_{what}",
            limit=bucket.per_minute,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
