"""What every HTTP request passes first: its id, its date, its API key. Knows no route but /v1."""

import re
import uuid
from collections.abc import Callable
from email.utils import formatdate
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixmesh.errors import BadApiKey
from router.edge.admission import ApiKey
from router.edge.exchange import send_error

REQUEST_ID_HEADER: Final = "x-request-id"
_CLEAN_ID: Final = re.compile(r"[!-~]{1,128}")
_PROTECTED: Final = "/v1/"


class Entrance:
    """Gives every request an id and every answer a date; wants the API key under /v1."""

    def __init__(self, app: ASGIApp, *, api_key: str, clock: Callable[[], float]) -> None:
        self._app = app
        self._clock = clock
        self._api_key = ApiKey(api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        label = headers.get(REQUEST_ID_HEADER, "")
        # Only a clean label comes back: it stands in headers and log lines.
        request_id = label if _CLEAN_ID.fullmatch(label) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer[REQUEST_ID_HEADER] = request_id
                answer["date"] = formatdate(self._clock(), usegmt=True)
            await send(message)

        if scope["path"].startswith(_PROTECTED):
            try:
                self._api_key.check(headers.get("authorization"))
            except BadApiKey as error:
                await send_error(error, send_with_id)
                return
        await self._app(scope, receive, send_with_id)
