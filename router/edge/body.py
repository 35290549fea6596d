"""A request's body, as far as it may be: large and slow ones are refused. Knows no route."""

import asyncio
from typing import Final

from fastapi import Request

from radixmesh.errors import InvalidRequest

BODY_TIMEOUT_S: Final = 60.0


class BadBody(InvalidRequest):
    """The request body is too large (413) or too slow (408)."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


async def read_body(
    request: Request, *, limit_bytes: int, timeout_s: float = BODY_TIMEOUT_S
) -> bytes:
    """Return the body of a request.

    Raises:
        BadBody: It is larger than `limit_bytes`, or has not arrived within `timeout_s`.
    """
    declared = request.headers.get("content-length", "")
    too_large = BadBody(f"the body is over {limit_bytes} bytes", status=413)
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                body += piece
                if len(body) > limit_bytes:
                    raise too_large
    except TimeoutError as error:
        raise BadBody(f"no body within {timeout_s} s", status=408) from error
    return bytes(body)
