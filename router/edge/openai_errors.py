"""OpenAI's errors, made from ours: status, body and headers. Knows JSON shapes; no HTTP."""

import math
from typing import Any, Final

from radixmesh.errors import MeshError

STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "RESOURCE_EXHAUSTED": 429,
    "CANCELLED": 499,
    "INTERNAL": 500,
    "FAILED_PRECONDITION": 500,
    "ABORTED": 500,
    "UNIMPLEMENTED": 501,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
}
_TYPES: Final = {401: "authentication_error", 429: "rate_limit_error"}
# OpenAI's names, where it has one; existing programs match on them.
_CODES: Final = {
    "BAD_API_KEY": "invalid_api_key",
    "MODEL_NOT_SERVED": "model_not_found",
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "QUEUE_FULL": "rate_limit_exceeded",
    "RATE_LIMITED": "rate_limit_exceeded",
}
# Fields of the domain that have another name in these APIs.
_PARAMS: Final = {"text": "prompt", "token_ids": "prompt", "choice_count": "n", "tenant": "user"}


def status_of(error: MeshError) -> int:
    """Return the HTTP status of an error."""
    return STATUS.get(error.code, 500)


def error_body(error: MeshError, status: int) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    fallback = "invalid_request_error" if status < 500 else "server_error"
    param = error.field.removeprefix("sampling.").removeprefix("chat.")
    param = _PARAMS.get(param, param)
    return {
        "error": {
            "message": error.message,
            "type": _TYPES.get(status, fallback),
            "param": param or None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


def error_headers(error: MeshError) -> dict[str, str]:
    """Return when to come again, and whether at all, in the headers that clients read."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
        headers["retry-after-ms"] = str(max(1, math.ceil(error.retry_after_s * 1000)))
    if error.reason == "REQUEST_POISONED":
        headers["x-should-retry"] = "false"  # OpenAI's clients repeat every 5xx otherwise
    return headers
