"""What is looked up in the DNS and at Kubernetes, as people write it. Data only; asks nobody."""

import re
from dataclasses import dataclass
from typing import Final

ALL_NAMESPACES: Final = "*"
SERVICE_LABEL: Final = "kubernetes.io/service-name"
_SERVICE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Lookup:
    """A name in the DNS; `port` 0: SRV records, which say it."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Lookup":
        """Read `HOST:PORT` or `_SERVICE._PROTO.HOST`.

        Raises:
            ValueError: It is neither.
        """
        if text.startswith("_") and ":" not in text:
            return cls(text, 0)
        host, _, port = text.rpartition(":")
        if not host or ":" in host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"{text!r} is neither HOST:PORT nor _SERVICE._PROTO.HOST")
        return cls(host, int(port))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which slices.

    Attributes:
        selector: Of their labels; those of their Service, and its name.
        namespace: Where; empty: the router's own; `*`: everywhere.
        port: Name or number; empty: the only one.
    """

    selector: str
    namespace: str = ""
    port: str = ""

    @classmethod
    def service(cls, text: str, *, namespace: str, port: str) -> "Wanted":
        """Read `[NAMESPACE/]SERVICE[:PORT]`; what it leaves out is as given.

        Raises:
            ValueError: It is something else.
        """
        place, _, own_port = text.partition(":")
        own_namespace, _, name = place.rpartition("/")
        if not _SERVICE.fullmatch(name):
            raise ValueError(f"{text!r} is not [NAMESPACE/]SERVICE[:PORT]")
        return cls(
            selector=f"{SERVICE_LABEL}={name}",
            namespace=own_namespace or namespace,
            port=own_port or port,
        )
