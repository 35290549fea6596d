"""A DNS server on a free port of loopback: answers A, AAAA and SRV from a table, or fails."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class FakeDns(asyncio.DatagramProtocol):
    """Answers what `records` has: (name, type) -> texts of records.

    Attributes:
        rcode: What every answer says; SERVFAIL and such.
        silent: It answers nothing.
        generous: Answers of SRV bring the addresses of their hosts.
        questions: What it was asked.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode = dns.rcode.NOERROR
        self.silent = False
        self.generous = False
        self.questions: list[tuple[str, str]] = []
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        asked = dns.message.from_wire(data)
        question = asked.question[0]
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        self.questions.append((name, kind))
        if self.silent or self._transport is None:
            return
        answer = dns.message.make_response(asked)
        answer.flags |= dns.flags.RA
        answer.set_rcode(self.rcode)
        found = self.records.get((name, kind), []) if self.rcode == dns.rcode.NOERROR else []
        if found:
            answer.answer.append(
                dns.rrset.from_text(question.name, 5, "IN", question.rdtype, *found)
            )
            if self.generous and kind == "SRV":
                self._add(answer, [record.split()[-1].rstrip(".") for record in found])
        elif self.rcode == dns.rcode.NOERROR and not any(name == one for one, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), addr)

    def _add(self, answer: dns.message.Message, hosts: list[str]) -> None:
        """Add the addresses that will be asked for next."""
        for host in hosts:
            found = self.records.get((host, "A"))
            if found:
                answer.additional.append(dns.rrset.from_text(f"{host}.", 5, "IN", "A", *found))


@asynccontextmanager
async def fake_dns() -> AsyncGenerator[tuple[FakeDns, dns.asyncresolver.Resolver]]:
    """Run a server; yields it and a resolver that asks it alone."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(FakeDns, local_addr=("127.0.0.1", 0))
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = ["127.0.0.1"]
    resolver.port = transport.get_extra_info("sockname")[1]
    try:
        yield server, resolver
    finally:
        transport.close()
