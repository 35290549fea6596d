"""How a rank process is started: what its starter and the fork server say to each other.

The starter makes the descriptors that a configuration names, hands both to the fork
server (`forkserver.py`) and hears from it when the process ends. Plain data; opens
and starts nothing.
"""

from collections.abc import Sequence
from signal import SIGKILL
from typing import Final

import msgspec

from radixmesh.errors import InvalidRequest, NotSupported
from worker.config import RankConfig

# A rank that says one of these at its start would say so again, however often it is started.
REFUSALS: Final = (InvalidRequest, NotSupported)
# The status of a rank whose end nobody could see.
LOST: Final = 1 << 16


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Start a rank. `number` names it from now on; the descriptors travel beside this."""

    number: int
    config: RankConfig


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Send a rank a signal, one that kills it as a rule; one that has ended is no error."""

    number: int
    signal: int = SIGKILL


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A rank runs."""

    number: int
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A rank has ended: its exit status, or minus the signal that killed it."""

    number: int
    status: int


_ORDERS: Final = msgspec.json.Decoder(Start | Kill)
_ANSWERS: Final = msgspec.json.Decoder(Started | Ended)


def decode_order(body: bytes) -> Start | Kill:
    """Read what the fork server is told.

    Raises:
        msgspec.ValidationError: It is none.
    """
    return _ORDERS.decode(body)


def decode_answer(body: bytes) -> Started | Ended:
    """Read what the fork server says.

    Raises:
        msgspec.ValidationError: It is none.
    """
    return _ANSWERS.decode(body)


def descriptors(config: RankConfig) -> list[int]:
    """Return the descriptors that a configuration names, in the order in which they travel."""
    named = (config.mailbox_fd, *config.broadcast_fds, config.tensor_fd, config.store_fd)
    return [fd for fd in named if fd >= 0]


def with_descriptors(config: RankConfig, fds: Sequence[int]) -> RankConfig:
    """Return the configuration with the numbers that its descriptors have in another process.

    Raises:
        ValueError: There are not as many as it names.
    """
    if len(fds) != len(descriptors(config)):
        raise ValueError(f"{len(fds)} descriptors came for {len(descriptors(config))}")
    rest = iter(fds)

    def renumbered(fd: int) -> int:
        return next(rest) if fd >= 0 else fd

    # Evaluated in the order of `descriptors`.
    return msgspec.structs.replace(
        config,
        mailbox_fd=renumbered(config.mailbox_fd),
        broadcast_fds=tuple(renumbered(fd) for fd in config.broadcast_fds),
        tensor_fd=renumbered(config.tensor_fd),
        store_fd=renumbered(config.store_fd),
    )


def needs_meeting(config: RankConfig) -> bool:
    """Whether the ranks of a replica get a place to meet.

    Records go by gloo, or tensors do, or would where shared memory can't be had.
    """
    return config.carrier == "gloo" or (config.engine == "torch" and config.pp * config.tp > 1)
