"""What both flavours of client share about a call: metadata, deadline, retries, errors."""

import random
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import grpc

from radixmesh.client.types import Options
from radixmesh.errors import Exhausted, MeshError, Unavailable
from radixmesh.rpc.channel import MAX_MESSAGE_BYTES
from radixmesh.rpc.status import from_rpc_error

CHANNEL_OPTIONS: Final = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
GENERATE_TIMEOUT_S: Final = 600.0
UNARY_TIMEOUT_S: Final = 10.0

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When a call that told nothing yet is made again.

    Only UNAVAILABLE and RESOURCE_EXHAUSTED are repeated, and a stream only before its
    first message: later, a repetition would say things twice.

    Attributes:
        attempts: Calls in all; 1 never repeats.
        first_pause_s: Pause before the second call; doubles, is jittered, and gives way
            to the server's hint when that is longer.
        longest_pause_s: Bound of every pause. Who has used up what he may, and is told to come
            back later than that, is not kept waiting: the error, which has the hint, is final.
    """

    attempts: int = 4
    first_pause_s: float = 0.1
    longest_pause_s: float = 5.0
    rng: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def pause(self, error: MeshError, attempt: int) -> float | None:
        """Return the seconds to wait after the failure of call `attempt` (1 is the first).

        None: it is final.
        """
        if attempt >= self.attempts or not isinstance(error, Unavailable | Exhausted):
            return None
        hint_s = error.retry_after_s or 0.0
        if isinstance(error, Exhausted) and hint_s > self.longest_pause_s:
            return None
        planned = self.first_pause_s * 2.0 ** (attempt - 1) * self.rng.uniform(0.5, 1.5)
        return min(max(planned, hint_s), self.longest_pause_s)


@contextmanager
def translated() -> Generator[None, None, None]:
    """Raise the MeshError that a failed RPC stands for."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error


def metadata(api_key: str, request_id: str = "") -> Metadata:
    """Return the metadata of a call; a request without an id gets one."""
    pairs: Metadata = (("x-request-id", request_id or uuid.uuid4().hex),)
    return (*pairs, ("authorization", f"Bearer {api_key}")) if api_key else pairs


def timeout_s(options: Options) -> float:
    """Return the seconds that a generate call may take."""
    return options.get("timeout_s", GENERATE_TIMEOUT_S)
