"""Two hosts of a test: network namespaces with a cable between them, and one to each from here.

Needs root on Linux and `ip`; `unavailable()` says what is missing. Everything goes when
the namespaces are deleted.
"""

import contextlib
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator


def unavailable() -> str:
    """Why there can be no namespaces here; empty when there can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux with iproute2"
    name = f"rmx-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


class TwoHosts:
    """Hosts 0 and 1. `inside` are their addresses to each other, `outside` host 0's to us."""

    def __init__(self) -> None:
        mark = secrets.token_hex(3)
        second, third = 16 + secrets.randbelow(200), secrets.randbelow(250)
        self.names = [f"rmx-{mark}-{number}" for number in (0, 1)]
        self.inside = [f"10.{second}.{third}.{number}" for number in (1, 2)]
        self.outside = f"10.{second}.{third + 1}.1"
        self._here = f"10.{second}.{third + 1}.2"
        self._cables = [f"rx{mark}{end}" for end in ("a", "b", "c", "d")]

    def lay(self) -> None:
        """Make hosts and cables."""
        a, b, c, d = self._cables
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip(
            "link",
            "add",
            a,
            "netns",
            self.names[0],
            "type",
            "veth",
            "peer",
            b,
            "netns",
            self.names[1],
        )
        _ip("link", "add", c, "netns", self.names[0], "type", "veth", "peer", d)
        for name, end, address in (
            (self.names[0], a, self.inside[0]),
            (self.names[1], b, self.inside[1]),
            (self.names[0], c, self.outside),
        ):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
        _ip("address", "add", f"{self._here}/24", "dev", d)
        _ip("link", "set", d, "up")

    def remove(self) -> None:
        """Take all away; what is missing is no error."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)

    def cut(self) -> None:
        """Pull the cable between the hosts: what is sent is lost, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", self._cables[1], "down")

    def heal(self) -> None:
        """Put it in again."""
        _ip("-n", self.names[1], "link", "set", self._cables[1], "up")

    def on(self, number: int) -> list[str]:
        """What a command line begins with to run on a host."""
        return ["ip", "netns", "exec", self.names[number]]


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts that are gone at the block's end."""
    hosts = TwoHosts()
    try:
        hosts.lay()
        yield hosts
    finally:
        hosts.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
