"""Who may come in and how long: the API key, requests and tokens at once, tenants' rates.

In two steps, because what a request costs is known only when its prompt is ids: on
arrival the tenant's requests a minute and a place for the request, then, with the
prompt tokenized, the tenant's tokens a minute and places for its tokens. Who waits for
tokens holds a place for a request and nothing that those with tokens need: nobody waits
in a circle.

Knows counts, classes, tenants and keys; nothing of what a request says. One event loop.
"""

import asyncio
import hmac
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from radixmesh.errors import BadApiKey, MeshError
from router.edge.permit import Permit, Told
from router.edge.places import BANDS, Places
from router.edge.tenants import Tenants

# A client that reads nothing is let go so long after its request's deadline.
LINGER_S: Final = 5.0
# Nor does it hold its place longer once it takes nothing more, not one message.
WRITE_TIMEOUT_S: Final = 30.0


class ApiKey:
    """Compares what callers bring with the configured key, in constant time.

    Args:
        key: The key; empty lets everybody in.
    """

    def __init__(self, key: str) -> None:
        self._expected = f"Bearer {key}".encode() if key else b""

    def check(self, authorization: str | None) -> None:
        """Check the value of an `authorization` header or metadata entry.

        Raises:
            BadApiKey: It is missing or is not `Bearer <key>`.
        """
        given = (authorization or "").encode(errors="replace")
        if self._expected and not hmac.compare_digest(given, self._expected):
            raise BadApiKey("the API key is missing or wrong")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLimits:
    """Bounds in tokens: what requests may use at most, prompt and outputs together.

    Attributes:
        max_concurrent: Of all running requests; 0 means no limit. A request that is
            larger runs when no other one does.
        max_queued: Of those who wait for tokens; 0 means no limit.
    """

    max_concurrent: int = 0
    max_queued: int = 0


class Admission:
    """Permits for requests, and bounded lines for those who wait.

    A permit is held until its request's stream has ended in any way.

    Args:
        max_concurrent: Requests at once; 0 means no limit.
        max_queued: Requests that may wait for their place; without a limit of requests,
            for their tokens.
        queue_timeout_s: Seconds that a request may wait, for both together.
        tokens: The same in tokens.
        tenants: Their rates; None: no limits.
        told: Who is told how long requests waited, and of refusals.
    """

    def __init__(
        self,
        *,
        max_concurrent: int,
        max_queued: int,
        queue_timeout_s: float,
        tokens: TokenLimits | None = None,
        tenants: Tenants | None = None,
        told: Told | None = None,
    ) -> None:
        self._queue_timeout_s = queue_timeout_s
        self._tenants = Tenants() if tenants is None else tenants
        self._told = told or Told()
        tokens = tokens or TokenLimits()
        self._requests = Places("places for requests", max_concurrent, max_waiting=max_queued)
        self._tokens = Places(
            "tokens",
            tokens.max_concurrent,
            # A limit of requests bounds those who wait with a place in hand, too.
            max_waiting=None if max_concurrent else max_queued,
            max_waiting_units=tokens.max_queued,
        )

    def __repr__(self) -> str:
        return f"<Admission {self._requests!r}, {self._tokens!r}>"

    @property
    def running(self) -> int:
        """Requests that have been let in and have not ended."""
        return self._requests.held - self._tokens.waiting

    @property
    def queued(self) -> int:
        """Requests that wait, for a place or for tokens."""
        return self._requests.waiting + self._tokens.waiting

    @property
    def queued_by_band(self) -> Mapping[str, int]:
        """The same by class: high is above 0, normal is 0, low below."""
        requests, tokens = self._requests.bands, self._tokens.bands
        return {band: requests[band] + tokens[band] for band in BANDS}

    @property
    def tokens(self) -> int:
        """Tokens that running requests hold."""
        return self._tokens.held

    @property
    def queued_tokens(self) -> int:
        """Tokens that are waited for."""
        return self._tokens.waiting_units

    @property
    def tenants(self) -> int:
        """Tenants that are remembered."""
        return len(self._tenants)

    def end(self, error: MeshError) -> None:
        """Send all away who wait for a place; those who wait for tokens end with their streams."""
        self._requests.end(error)

    @asynccontextmanager
    async def admit(
        self, timeout_s: float, *, priority: int = 0, tenant: str = ""
    ) -> AsyncGenerator[Permit]:
        """Hold a permit for the time of the context.

        Args:
            timeout_s: Seconds until the request's deadline.
            priority: Class; higher ones go first.
            tenant: Whose rate counts.

        Raises:
            QueueFull: The line is full, or the wait in it was too long.
            RateLimited: The tenant has used up its requests or tokens.
            DeadlineExceeded: The deadline came first.
        """
        account = self._tenants.account(tenant, asyncio.get_running_loop().time())
        permit = Permit(
            self._requests,
            self._tokens,
            account,
            priority=priority,
            queue_timeout_s=self._queue_timeout_s,
            told=self._told,
        )
        await permit.enter(timeout_s)
        try:
            yield permit
        finally:
            permit.leave()
