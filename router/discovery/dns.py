"""Names in the DNS as a source: the addresses of a headless Service. Knows names; no fleet.

`HOST:PORT` lists every A record of a name (every AAAA record where there is none of A);
`_SERVICE._PROTO.HOST` lists its SRV records, which bring ports of their own. The DNS can't tell
"nobody" from "I don't know yet": an empty answer never takes anybody out.
"""

import asyncio
import logging
import random
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.rdatatype import RdataType

from router.discovery.lookup import Lookup
from router.discovery.member import Member, Publish, at_address

logger = logging.getLogger(__name__)

JITTER = 0.2
_LOOKUPS_AT_ONCE = 32


class DnsSource:
    """Lists who is behind a name.

    Args:
        lookup: What to look up.
        interval_s: Seconds between two looks, give or take a fifth.
        rng: That fifth.
        resolver: Asks; None takes the system's servers.
        timeout_s: For one question.
    """

    def __init__(
        self,
        lookup: Lookup,
        *,
        interval_s: float,
        rng: random.Random,
        resolver: dns.asyncresolver.Resolver | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self.name = f"dns {lookup.host}"
        self._lookup = lookup
        self._interval_s = interval_s
        self._rng = rng
        self._resolver = resolver
        self._timeout_s = timeout_s
        self._known = False
        self._failing = False
        self._at_once = asyncio.Semaphore(_LOOKUPS_AT_ONCE)

    async def run(self, publish: Publish) -> None:
        """Publish what the name stands for, again and again."""
        while True:
            try:
                members = await self.look()
            except (dns.exception.DNSException, OSError) as error:
                self._warn(str(error))
            else:
                self._take(members, publish)
            await asyncio.sleep(self._interval_s * self._rng.uniform(1 - JITTER, 1 + JITTER))

    def _take(self, members: list[Member], publish: Publish) -> None:
        if members or not self._known:
            self._failing = False
            self._known = self._known or bool(members)
            publish(members)
        else:
            self._warn("an empty answer")

    def _warn(self, error: str) -> None:
        if not self._failing:
            logger.warning("the list stays as it was", extra={"source": self.name, "error": error})
        self._failing = True

    async def look(self) -> list[Member]:
        """Return who is there now.

        Raises:
            dns.exception.DNSException: No server answered, or it failed.
        """
        if self._lookup.port:
            places = await self._hosts(self._lookup.host, self._lookup.port)
        else:
            places = await self._services(self._lookup.host)
        return [Member(key=place, address=place) for place in dict.fromkeys(places)]

    async def _services(self, name: str) -> list[str]:
        answer = await self._ask(name, RdataType.SRV)
        if answer is None:
            return []
        # Servers add the addresses that will be asked for next; Kubernetes' does for all pods.
        added = {
            found.name: [each.address for each in found]
            for found in answer.response.additional
            if found.rdtype == RdataType.A
        }

        async def places(record: Any) -> list[str]:
            if record.target in added:
                return [at_address(host, record.port) for host in added[record.target]]
            return await self._hosts(str(record.target), record.port)

        found = await asyncio.gather(*(places(record) for record in answer))
        return [place for each in found for place in each]

    async def _hosts(self, host: str, port: int) -> list[str]:
        async with self._at_once:
            found = await self._ask(host, RdataType.A)
            if found is not None:
                return [at_address(each.address, port) for each in found]
            found = await self._ask(host, RdataType.AAAA)
            return [at_address(each.address, port, ipv6=True) for each in found or ()]

    async def _ask(self, name: str, kind: RdataType) -> dns.resolver.Answer | None:
        """Return the records of a name, or None where there are none."""
        if self._resolver is None:
            self._resolver = dns.asyncresolver.Resolver()
        try:
            return await self._resolver.resolve(name, kind, search=True, lifetime=self._timeout_s)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None
