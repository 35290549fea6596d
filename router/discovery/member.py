"""What sources list: members of the fleet. Data only; no source, no fleet, no loop."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

MAX_NAME_BYTES: Final = 256
# A name of the DNS, an IPv4 address, or an IPv6 address in brackets; no other target of gRPC's,
# such as unix:PATH, and nothing that is no text or breaks a log line.
_ADDRESS: Final = re.compile(
    r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,32})?\])"
    r":(?P<port>[0-9]{1,5})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One process that a source knows.

    Attributes:
        key: Who it is: another key is another process, even at the same address.
        address: `HOST:PORT`, IPv6 in brackets.
        name: What to call it; empty means its address.
        draining: It is about to go: it gets nothing new and finishes what it has.
    """

    key: str
    address: str
    name: str = ""
    draining: bool = False


Publish = Callable[[Sequence[Member]], None]


class Source(Protocol):
    """Something that knows members."""

    @property
    def name(self) -> str:
        """What it is called in logs; no two of one reconciler share it."""
        ...

    async def run(self, publish: Publish) -> None:
        """Publish all members that there are: once when they are known, then after changes.

        Never publishes what it only fails to know: then the last list stands.
        """


def is_address(text: str) -> bool:
    """Whether a text is HOST:PORT, and can be dialled and logged."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and 0 < int(found["port"]) < 65536


def is_name(text: str) -> bool:
    """Whether a member can be called so: text of one line, at most `MAX_NAME_BYTES`."""
    return text.isprintable() and len(text.encode()) <= MAX_NAME_BYTES


def parse_member(text: str) -> Member:
    """Read `HOST:PORT` or `NAME=HOST:PORT`; who is at an address is known by it.

    Raises:
        ValueError: It is neither.
    """
    name, _, address = text.strip().rpartition("=")
    if not is_address(address) or not is_name(name):
        raise ValueError(f"{text!r} is not HOST:PORT")
    return Member(key=address, address=address, name=name)


def at_address(host: str, port: int, *, ipv6: bool = False) -> str:
    """Return HOST:PORT of an IP address."""
    return f"[{host}]:{port}" if ipv6 else f"{host}:{port}"
