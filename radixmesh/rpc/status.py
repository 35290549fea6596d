"""Errors on the wire: MeshError <-> google.rpc.Status and <-> link Failure. The only such table."""

import logging
import uuid
from typing import Final

import grpc
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from radixmesh.common.v1 import error_reason_pb2, link_pb2
from radixmesh.errors import BY_REASON, InternalError, MeshError

__all__ = [
    "DOMAIN",
    "conceal",
    "from_failure",
    "from_rpc_error",
    "from_status",
    "to_failure",
    "to_status",
]

logger = logging.getLogger(__name__)

DOMAIN: Final = "radixmesh"
_PREFIX: Final = "ERROR_REASON_"
# Bytes. A status travels in HTTP/2 headers, thrice and percent-encoded, and peers cap
# these at 8 KiB together; text may come from outside.
_MAX_TEXT: Final = 600
_MAX_METADATA: Final = 8
_MAX_VALUE: Final = 100

# The class for a status that carries no reason of ours: another server, a proxy, gRPC itself.
_BY_CODE: Final[dict[str, str]] = {
    "CANCELLED": "CANCELLED",
    "INVALID_ARGUMENT": "INVALID_REQUEST",
    "DEADLINE_EXCEEDED": "DEADLINE_EXCEEDED",
    "UNAUTHENTICATED": "BAD_API_KEY",
    "PERMISSION_DENIED": "BAD_API_KEY",
    "RESOURCE_EXHAUSTED": "QUEUE_FULL",
    "UNIMPLEMENTED": "NOT_SUPPORTED",
    "UNAVAILABLE": "SERVICE_UNAVAILABLE",
}


def conceal(error: BaseException, doing: str) -> InternalError:
    """Log an unexpected error under a new id; return one that names the id and nothing else."""
    error_id = uuid.uuid4().hex[:16]
    logger.error("unexpected error", exc_info=error, extra={"error_id": error_id, "doing": doing})
    return InternalError(f"internal error, id {error_id}", error_id=error_id)


def to_failure(entry_id: int, error: MeshError) -> link_pb2.Failure:
    """Return the link item that ends an entry by this error."""
    return link_pb2.Failure(
        entry_id=entry_id,
        reason=error_reason_pb2.ErrorReason.Value(_PREFIX + error.reason),
        message=_cut(error.message, _MAX_TEXT),
        metadata=_metadata(error),
        retry_after_ms=_milliseconds(error.retry_after_s),
        field=_cut(error.field, _MAX_VALUE),
    )


def from_failure(failure: link_pb2.Failure) -> MeshError:
    """Return the error of a link item; a reason from the future becomes InternalError."""
    names = error_reason_pb2.ErrorReason.DESCRIPTOR.values_by_number
    value = names.get(failure.reason)
    reason = value.name.removeprefix(_PREFIX) if value else ""
    return _build(
        reason,
        failure.message,
        field=failure.field,
        metadata=dict(failure.metadata),
        retry_after_s=failure.retry_after_ms / 1000 if failure.retry_after_ms else None,
    )


def to_status(error: MeshError) -> status_pb2.Status:
    """Return the rich status of an error: ErrorInfo always, BadRequest and RetryInfo where due."""
    message = _cut(error.message, _MAX_TEXT)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code), message=message)
    info = error_details_pb2.ErrorInfo(
        reason=error.reason, domain=DOMAIN, metadata=_metadata(error)
    )
    status.details.add().Pack(info)
    if error.field:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=_cut(error.field, _MAX_VALUE), description=message)
        status.details.add().Pack(bad)
    if error.retry_after_s:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(_milliseconds(error.retry_after_s))
        status.details.add().Pack(retry)
    return status


def from_status(status: status_pb2.Status) -> MeshError:
    """Return the error of a rich status; without a reason of ours, by its code."""
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for known in (info, bad, retry):
            if detail.Is(known.DESCRIPTOR):
                detail.Unpack(known)
    code = code_pb2.Code.Name(status.code) if status.code in code_pb2.Code.values() else ""
    reason = info.reason if info.domain == DOMAIN else _BY_CODE.get(code, "")
    delay = retry.retry_delay.ToMilliseconds() / 1000
    return _build(
        reason,
        status.message,
        field=bad.field_violations[0].field if bad.field_violations else "",
        metadata=dict(info.metadata),
        retry_after_s=delay or None,
    )


def from_rpc_error(error: grpc.RpcError) -> MeshError:
    """Return the error that a failed RPC stands for, sync or asyncio."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        status = None  # details that contradict the status: trust the status alone
    if status is None:
        code = error.code()
        status = status_pb2.Status(
            code=code.value[0] if code else code_pb2.Code.Value("UNKNOWN"),
            message=error.details() or "",
        )
    return from_status(status)


def _build(
    reason: str,
    message: str,
    *,
    field: str,
    metadata: dict[str, str],
    retry_after_s: float | None,
) -> MeshError:
    kind = BY_REASON.get(reason, InternalError)
    error = kind(message, field=field, retry_after_s=retry_after_s)
    # Not by keyword: names come from the peer and may be those of parameters.
    error.metadata = metadata
    error.retry_after_s = retry_after_s
    return error


def _metadata(error: MeshError) -> dict[str, str]:
    pairs = list(error.metadata.items())[:_MAX_METADATA]
    return {_cut(key, _MAX_VALUE): _cut(value, _MAX_VALUE) for key, value in pairs}


def _milliseconds(seconds: float | None) -> int:
    """Whole milliseconds, never 0 for a hint that is there, within uint32."""
    return min(max(1, round(seconds * 1000)), 2**32 - 1) if seconds else 0


def _cut(text: str, limit: int) -> str:
    # A lone surrogate can't be encoded; protobuf would refuse the whole status.
    raw = text.encode(errors="replace")
    if len(raw) <= limit:
        return raw.decode()
    return raw[: limit - 3].decode(errors="ignore") + "..."
