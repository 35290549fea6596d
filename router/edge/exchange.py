"""One HTTP request's exchange: its events out, as they come or as a whole, while its client reads.

Owns the event generator from the first step to the last: whatever ends the
exchange - the end, an error, a client that left, a server that stops - the
generator is closed before the response returns, so nothing upstream outlives it.
Knows ASGI; not what the events mean.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from radixmesh.errors import InternalError, MeshError
from router.edge.admission import WRITE_TIMEOUT_S
from router.edge.answers import Answer
from router.edge.openai_errors import error_body, error_headers, status_of
from router.request import Event

logger = logging.getLogger(__name__)

_SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx holds streams back otherwise
}
_DONE = b"data: [DONE]\n\n"
_UNICODE_LINE_ENDS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}


class _TakesNothingError(Exception):
    """The client has not taken a message in time; there is nobody to tell."""


class Exchange(Response):
    """A response that runs the request it answers.

    Args:
        events: Of the request.
        answer: Makes bodies of them.
        stream: Whether the client wants them as they come.
        timeout_s: A client that has not read its answer by then is let go.
        write_timeout_s: So is one that takes nothing for so long.
    """

    def __init__(
        self,
        events: AsyncIterator[Event],
        answer: Answer,
        *,
        stream: bool,
        timeout_s: float,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self._events = events
        self._answer = answer
        self._timeout_s = timeout_s
        self._write_timeout_s = write_timeout_s
        self._respond = self._send_stream if stream else self._send_whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run until the answer is sent, the client has left, or its time is over."""
        del scope
        work = asyncio.ensure_future(self._run(self._impatient(send)))
        left = asyncio.ensure_future(_client_leaves(receive))
        try:
            ended, _ = await asyncio.wait(
                {work, left}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                _tell_let_go(self._timeout_s)
        finally:
            work.cancel()
            left.cancel()
            results = await asyncio.gather(work, left, return_exceptions=True)
        for result in results:
            if isinstance(result, _TakesNothingError):
                _tell_let_go(self._write_timeout_s)
            elif isinstance(result, Exception):
                raise result

    def _impatient(self, send: Send) -> Send:
        async def within_time(message: Message) -> None:
            try:
                async with asyncio.timeout(self._write_timeout_s):
                    await send(message)
            except TimeoutError:
                raise _TakesNothingError from None

        return within_time

    async def _run(self, send: Send) -> None:
        async with closing(self._events) as events:
            await self._respond(events, send)

    async def _send_whole(self, events: AsyncIterator[Event], send: Send) -> None:
        try:
            async for event in events:
                self._answer.take(event)
            body = self._answer.body()
        except Exception as error:  # noqa: BLE001 - every error has an answer
            await send_error(as_mesh_error(error), send)
        else:
            await _send_response(200, {"content-type": "application/json"}, encode(body), send)

    async def _send_stream(self, events: AsyncIterator[Event], send: Send) -> None:
        # The status goes with the first event, so that an error before it has one of its own.
        started = False
        try:
            async for event in events:
                frames = b"".join(sse(chunk) for chunk in self._answer.chunks(event))
                if not started:
                    await send(_start(200, _SSE_HEADERS))
                    started = True
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
            last = b"".join(sse(chunk) for chunk in self._answer.last()) + _DONE
        except _TakesNothingError:
            raise
        except Exception as error:  # noqa: BLE001 - every error has an answer
            meaning = as_mesh_error(error)
            if not started:
                await send_error(meaning, send)
                return
            last = sse(error_body(meaning, status_of(meaning)))
        await send({"type": "http.response.body", "body": last})


def _tell_let_go(seconds: float) -> None:
    # Without the rest of its response the server closes the connection.
    logger.warning("client does not read", extra={"seconds": seconds})


async def merged(streams: Sequence[AsyncIterator[Event]], choices: int) -> AsyncIterator[Event]:
    """Yield the events of several streams as they come, with choices numbered through.

    Stream i has the choices i * `choices` and following. The first error ends all.
    """
    if len(streams) == 1:
        async with closing(streams[0]) as only:
            async for event in only:
                yield event
        return
    queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(maxsize=len(streams))
    pumps = [
        asyncio.ensure_future(_pump(stream, index * choices, queue))
        for index, stream in enumerate(streams)
    ]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    stream: AsyncIterator[Event], first: int, queue: asyncio.Queue[Event | Exception | None]
) -> None:
    try:
        async with closing(stream) as events:
            async for event in events:
                await queue.put(replace(event, choice=event.choice + first))
    except Exception as error:  # noqa: BLE001 - it is raised where the queue is read
        await queue.put(error)
    else:
        await queue.put(None)


@asynccontextmanager
async def closing(events: AsyncIterator[Event]) -> AsyncGenerator[AsyncIterator[Event], None]:
    """Close a generator on the way out; nothing else runs its `finally` in time."""
    try:
        yield events
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()


def as_mesh_error(error: Exception) -> MeshError:
    """Return the error itself, or for a bug one that names an id under which it is logged."""
    if isinstance(error, MeshError) and not isinstance(error, InternalError):
        return error
    error_id = uuid.uuid4().hex
    logger.error("request failed by a bug", extra={"error_id": error_id}, exc_info=error)
    return InternalError(f"internal error; report the error id {error_id}", error_id=error_id)


async def send_error(error: MeshError, send: Send, *, status: int | None = None) -> None:
    """Answer with an error in OpenAI's shape."""
    status = status_of(error) if status is None else status
    headers = {"content-type": "application/json", **error_headers(error)}
    await _send_response(status, headers, encode(error_body(error, status)), send)


def encode(body: Any) -> bytes:
    """Return JSON."""
    return msgspec.json.encode(body)


def sse(body: Any) -> bytes:
    """Return one server-sent event.

    Line ends of Unicode are escaped: many clients take them for the end of the event's line.
    """
    data = msgspec.json.encode(body)
    for raw, escaped in _UNICODE_LINE_ENDS.items():
        data = data.replace(raw, escaped)
    return b"data: %b\n\n" % data


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_response(status: int, headers: dict[str, str], body: bytes, send: Send) -> None:
    await send(_start(status, {**headers, "content-length": str(len(body))}))
    await send({"type": "http.response.body", "body": body})


def _start(status: int, headers: dict[str, str]) -> dict[str, Any]:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
