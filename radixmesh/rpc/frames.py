"""What both ends of a link share: limits, names, the hello. Knows no stream and no entry."""

from dataclasses import dataclass
from typing import Any, Final, Protocol, Self, TypeVar

from radixmesh.common.v1 import link_pb2
from radixmesh.errors import InvalidRequest, NotSupported

__all__ = [
    "DEFAULT_LIMITS",
    "PROTOCOL_VERSION",
    "Frame",
    "Identity",
    "LinkLimits",
    "Peer",
    "fragment",
    "hello",
    "introduced",
    "ping",
]

PROTOCOL_VERSION: Final = 1
MAX_NAME: Final = 256
MIB: Final = 1024 * 1024


class Frame(Protocol):
    """A generated frame class: any message with a `link` part."""

    def __init__(self) -> None: ...

    @property
    def link(self) -> link_pb2.LinkControl:
        """What all links share."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Encode."""

    @classmethod
    def FromString(cls, s: Any, /) -> Self:  # noqa: N802
        """Decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds and intervals of a link.

    Attributes:
        heartbeat_s: The longest silence that this side allows itself.
        peer_timeout_s: A peer silent for longer is lost.
        connect_timeout_s: A dial that takes longer, hello included, has failed.
        max_frame_bytes: No frame on the wire is larger.
        max_item_bytes: No single item (say, one prompt) is larger.
        max_pending_bytes: Unsent CONTROL and WORK bytes.
        max_feed_bytes: Unsent FEED bytes.
        max_incomplete_bytes: Received pieces of frames that are not whole yet.
        backoff_initial_s: Window of the first reconnect; it doubles.
        backoff_max_s: The widest window.
    """

    heartbeat_s: float = 2.0
    peer_timeout_s: float = 6.0
    connect_timeout_s: float = 5.0
    max_frame_bytes: int = 64 * 1024
    max_item_bytes: int = 16 * MIB
    max_pending_bytes: int = 64 * MIB
    max_feed_bytes: int = 16 * MIB
    max_incomplete_bytes: int = 56 * MIB  # one item of each lane, and what pieces cost
    backoff_initial_s: float = 0.1
    backoff_max_s: float = 5.0


DEFAULT_LIMITS: Final = LinkLimits()


@dataclass(frozen=True, slots=True)
class Identity:
    """This process on its links. `instance_id` is made anew at every start."""

    name: str
    instance_id: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end."""

    name: str
    instance_id: str


Out = TypeVar("Out", bound=Frame)


def hello(out: type[Out], identity: Identity, limits: LinkLimits) -> Out:
    """Return the frame that introduces this side."""
    frame = out()
    said = frame.link.hello
    said.peer_name = identity.name
    said.instance_id = identity.instance_id
    said.protocol_version = PROTOCOL_VERSION
    said.heartbeat_interval_ms = max(1, int(limits.heartbeat_s * 1000))
    return frame


def introduced(frame: Frame) -> Peer:
    """Return who sent this first frame.

    Raises:
        InvalidRequest: It has no hello, or names too long for a log line.
        NotSupported: The peer speaks another version.
    """
    link = frame.link
    if not link.HasField("hello"):
        raise InvalidRequest("the first frame of a link must carry hello")
    version = link.hello.protocol_version
    if version != PROTOCOL_VERSION:
        raise NotSupported(
            f"link protocol version {version} is not spoken here, only {PROTOCOL_VERSION}",
            version=version,
        )
    if max(len(link.hello.peer_name), len(link.hello.instance_id)) > MAX_NAME:
        raise InvalidRequest(f"names in hello have at most {MAX_NAME} characters")
    return Peer(link.hello.peer_name, link.hello.instance_id)


def fragment(out: type[Out], fragment_id: int, data: bytes, last: bool) -> bytes:
    """Return the serialized frame that carries one piece of a larger one."""
    frame = out()
    frame.link.fragments.add(fragment_id=fragment_id, data=data, last=last)
    return frame.SerializeToString()


def ping(out: type[Out]) -> bytes:
    """Return the serialized frame that says only that this side lives."""
    frame = out()
    frame.link.ping = 1
    return frame.SerializeToString()
