"""The error tree. Knows reasons, code names and advice; knows no wire (`rpc/status.py` does).

    MeshError
    ├── InvalidRequest            INVALID_ARGUMENT    fix the request
    │   ├── UnsupportedParameter
    │   ├── PromptTooLong
    │   ├── BadSampling
    │   ├── UnknownToken
    │   └── TemplateFailed
    ├── BadApiKey                 UNAUTHENTICATED     bring a valid key
    ├── NotFound                  NOT_FOUND           ask for something else
    │   ├── ModelNotServed
    │   └── GroupNotFound
    ├── AlreadyExists             ALREADY_EXISTS      choose another name
    │   └── GroupExists
    ├── Exhausted                 RESOURCE_EXHAUSTED  back off, then again
    │   ├── QueueFull
    │   ├── RateLimited
    │   ├── SlowConsumer
    │   └── LinkOverloaded
    ├── Unavailable               UNAVAILABLE         elsewhere, or again
    │   ├── NoReplicaReady
    │   ├── ServiceUnavailable
    │   ├── GroupLost
    │   ├── LinkLost
    │   └── Draining
    ├── RankDesync                ABORTED             like GroupLost
    ├── RequestPoisoned           ABORTED             do not send it again
    ├── TokenizerMismatch         FAILED_PRECONDITION deploy one tokenizer
    ├── DeadlineExceeded          DEADLINE_EXCEEDED   nothing; all is freed
    ├── Cancelled                 CANCELLED           nothing; all is freed
    ├── NotSupported              UNIMPLEMENTED       use another server
    └── InternalError             INTERNAL            report the error id

Pure cores raise these; one interceptor turns them into a status, one client
function turns a status back into them.
"""

from collections.abc import Iterator
from typing import ClassVar, Final


class MeshError(Exception):
    """An error with a meaning for the caller.

    Attributes:
        reason: Name of a value of `radixmesh.common.v1.ErrorReason`, without its prefix.
        code: Name of the gRPC status code.
        advice: What the caller does about it.
        message: For people.
        metadata: Numbers that the caller could act on.
        retry_after_s: Seconds after which a retry may help, or None.
        field: The request field at fault, for input errors.
    """

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[str] = "INTERNAL"
    advice: ClassVar[str] = "report the error id"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_s: float | None = None,
        **metadata: object,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r})"


class InvalidRequest(MeshError):
    """The request is malformed or contradicts itself."""

    reason = "INVALID_REQUEST"
    code = "INVALID_ARGUMENT"
    advice = "fix the request"


class UnsupportedParameter(InvalidRequest):
    """A parameter that this server does not support."""

    reason = "UNSUPPORTED_PARAMETER"
    advice = "drop the parameter"


class PromptTooLong(InvalidRequest):
    """The prompt leaves not enough room for output, in the context or in a replica's KV cache."""

    reason = "PROMPT_TOO_LONG"
    advice = "shorten the prompt or ask for fewer tokens"


class BadSampling(InvalidRequest):
    """A sampling parameter is out of range."""

    reason = "BAD_SAMPLING"


class UnknownToken(InvalidRequest):
    """A token id is outside the vocabulary."""

    reason = "UNKNOWN_TOKEN"


class TemplateFailed(InvalidRequest):
    """The chat template refused the messages, or there is none."""

    reason = "TEMPLATE_FAILED"
    advice = "fix the messages"


class BadApiKey(MeshError):
    """The API key is missing or wrong."""

    reason = "BAD_API_KEY"
    code = "UNAUTHENTICATED"
    advice = "bring a valid key"


class NotFound(MeshError):
    """Something that was named does not exist."""

    reason = "GROUP_NOT_FOUND"
    code = "NOT_FOUND"
    advice = "ask for something else"


class ModelNotServed(NotFound):
    """No group of this mesh serves the model."""

    reason = "MODEL_NOT_SERVED"
    advice = "ask another mesh"


class GroupNotFound(NotFound):
    """There is no such group or replica."""

    reason = "GROUP_NOT_FOUND"


class AlreadyExists(MeshError):
    """Something that was to be made exists."""

    reason = "GROUP_EXISTS"
    code = "ALREADY_EXISTS"
    advice = "choose another name"


class GroupExists(AlreadyExists):
    """A group of this name or address is in the fleet already."""

    reason = "GROUP_EXISTS"


class Exhausted(MeshError):
    """A bound was reached."""

    reason = "QUEUE_FULL"
    code = "RESOURCE_EXHAUSTED"
    advice = "back off, then try again"
    default_retry_after_s: ClassVar[float | None] = 1.0


class QueueFull(Exhausted):
    """A queue or a concurrency limit is full."""

    reason = "QUEUE_FULL"


class RateLimited(Exhausted):
    """The tenant has used up what it may use for now."""

    reason = "RATE_LIMITED"
    advice = "wait as long as the hint says, then try again"


class SlowConsumer(Exhausted):
    """A reader fell too far behind; its request ended."""

    reason = "SLOW_CONSUMER"
    advice = "read faster"
    default_retry_after_s: ClassVar[float | None] = None


class LinkOverloaded(Exhausted):
    """The outgoing buffer of a link is full."""

    reason = "LINK_OVERLOADED"


class Unavailable(MeshError):
    """Nobody can do this now; somebody else, or a later time, may."""

    reason = "SERVICE_UNAVAILABLE"
    code = "UNAVAILABLE"
    advice = "try elsewhere, or again later"
    default_retry_after_s: ClassVar[float | None] = 1.0


class NoReplicaReady(Unavailable):
    """The model is known, no replica is ready."""

    reason = "NO_REPLICA_READY"


class ServiceUnavailable(Unavailable):
    """No tokenizer or detokenizer is reachable."""

    reason = "SERVICE_UNAVAILABLE"


class GroupLost(Unavailable):
    """The replica that held the request is gone."""

    reason = "GROUP_LOST"
    advice = "router: resume elsewhere; client: try again"


class LinkLost(Unavailable):
    """The link that carried the request is gone."""

    reason = "LINK_LOST"
    advice = "router: resume elsewhere; client: try again"


class Draining(Unavailable):
    """The service takes no new work."""

    reason = "DRAINING"
    advice = "go elsewhere"


class RankDesync(MeshError):
    """The ranks of a replica disagreed; it restarts."""

    reason = "RANK_DESYNC"
    code = "ABORTED"
    advice = "router: resume elsewhere; client: try again"


class RequestPoisoned(MeshError):
    """The request took down two replicas."""

    reason = "REQUEST_POISONED"
    code = "ABORTED"
    advice = "do not send it again"


class TokenizerMismatch(MeshError):
    """Tokenizer and worker load different tokenizers."""

    reason = "TOKENIZER_MISMATCH"
    code = "FAILED_PRECONDITION"
    advice = "deploy one tokenizer for the model"


class DeadlineExceeded(MeshError):
    """The deadline passed."""

    reason = "DEADLINE_EXCEEDED"
    code = "DEADLINE_EXCEEDED"
    advice = "nothing; everything is freed"


class Cancelled(MeshError):
    """The caller cancelled."""

    reason = "CANCELLED"
    code = "CANCELLED"
    advice = "nothing; everything is freed"


class NotSupported(MeshError):
    """This server does not offer the call."""

    reason = "NOT_SUPPORTED"
    code = "UNIMPLEMENTED"
    advice = "use another server"


class InternalError(MeshError):
    """A bug; the message names an error id."""


def _tree(root: type[MeshError]) -> Iterator[type[MeshError]]:
    for child in root.__subclasses__():
        yield child
        yield from _tree(child)


# The most specific class of each reason; a subclass comes after its parent.
BY_REASON: Final[dict[str, type[MeshError]]] = {error.reason: error for error in _tree(MeshError)}

# Errors after which a router continues the request elsewhere from its journal.
RESUMABLE: Final[frozenset[str]] = frozenset(
    {"GROUP_LOST", "LINK_LOST", "DRAINING", "RANK_DESYNC", "SERVICE_UNAVAILABLE", "LINK_OVERLOADED"}
)
