"""The HTTP edge: OpenAI's API, health and metrics on the pipeline. Knows HTTP; decides nothing.

Everything that it needs is given to `build_http`; it reads no settings and
starts nothing.
"""

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Final, Protocol

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from radixmesh import __version__
from radixmesh.errors import InvalidRequest, MeshError, ModelNotServed
from router.edge.admission import LINGER_S, WRITE_TIMEOUT_S
from router.edge.answers import Answer, Head
from router.edge.body import BODY_TIMEOUT_S, BadBody, read_body
from router.edge.entrance import REQUEST_ID_HEADER, Entrance
from router.edge.exchange import Exchange, as_mesh_error, encode, merged
from router.edge.openai import Ask, read_chat, read_completion
from router.edge.openai_errors import error_body, error_headers, status_of
from router.edge.styles import ChatStyle, CompletionStyle, Style
from router.request import Event, GenerateRequest

RECEIPT_HEADER: Final = "x-radixmesh-receipt"
# The second is the name that SGLang's gateway gives it.
SESSION_HEADERS: Final = ("x-radixmesh-session", "x-smg-routing-key")


class ServedModel(Protocol):
    """A model that the fleet serves."""

    @property
    def name(self) -> str:
        """For `model` of a request."""
        ...

    @property
    def max_model_len(self) -> int:
        """Prompt and output ids of one request."""
        ...

    @property
    def ready_replicas(self) -> int:
        """Replicas that take requests now."""
        ...


class Pipeline(Protocol):
    """What the edge stands on."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Run a request. Closing the generator frees all that it holds."""
        ...

    def models(self) -> Sequence[ServedModel]:
        """Return the served models."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Bounds of the HTTP edge.

    Attributes:
        api_key: The key that /v1 wants as a Bearer token; empty: none.
        max_body_bytes: The largest request body.
        body_timeout_s: Seconds in which a body has to arrive.
        request_timeout_s: The longest time of a request.
        write_timeout_s: A client that takes nothing for so long is let go.
        cors_origins: Origins of browsers that may call; `*` is any.
    """

    api_key: str = ""
    max_body_bytes: int = 16 * 1024 * 1024
    body_timeout_s: float = BODY_TIMEOUT_S
    request_timeout_s: float = 600.0
    write_timeout_s: float = WRITE_TIMEOUT_S
    cors_origins: tuple[str, ...] = ("*",)


def build_http(
    pipeline: Pipeline,
    *,
    ready: Callable[[], bool],
    registry: CollectorRegistry,
    limits: HttpLimits | None = None,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """Make the ASGI application.

    Args:
        pipeline: Runs requests.
        ready: Whether a request can be served now.
        registry: What /metrics shows.
        limits: Bounds and the API key.
        clock: Seconds since the epoch, for `created`.
    """
    limits = limits or HttpLimits()
    app = FastAPI(title="radixmesh", version=__version__, docs_url=None, redoc_url=None)
    edge = _Edge(pipeline, limits, clock)
    app.add_api_route("/v1/chat/completions", edge.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/completions", edge.completion, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", edge.list_models, methods=["GET"], response_model=None)
    app.add_api_route("/v1/models/{name:path}", edge.get_model, methods=["GET"])
    _add_operation(app, ready, registry)
    app.add_exception_handler(MeshError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(HTTPException, _on_http_exception)
    # The last one added is the outermost: browsers must see errors of the others too.
    app.add_middleware(Entrance, api_key=limits.api_key, clock=clock)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(limits.cors_origins),
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER, "retry-after"],
    )
    return app


class _Edge:
    """The handlers of /v1."""

    def __init__(self, pipeline: Pipeline, limits: HttpLimits, clock: Callable[[], float]) -> None:
        self._pipeline = pipeline
        self._limits = limits
        self._clock = clock

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        ask = read_chat(body, request_id=request.state.request_id)
        return self._exchange(request, ask, ChatStyle())

    async def completion(self, request: Request) -> Response:
        body = await self._body(request)
        ask = read_completion(body, request_id=request.state.request_id)
        return self._exchange(request, ask, CompletionStyle())

    async def list_models(self) -> Response:
        created = int(self._clock())
        data = [_model_body(model, created) for model in self._pipeline.models()]
        return _json({"object": "list", "data": data})

    async def get_model(self, name: str) -> Response:
        for model in self._pipeline.models():
            if model.name == name:
                return _json(_model_body(model, int(self._clock())))
        raise ModelNotServed(f"no group serves {name[:200]!r}", field="model")

    async def _body(self, request: Request) -> bytes:
        limits = self._limits
        return await read_body(
            request, limit_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
        )

    def _exchange(self, request: Request, ask: Ask, style: Style) -> Response:
        first = ask.requests[0]
        head = Head(
            id=style.prefix + uuid.uuid4().hex,
            created=int(self._clock()),
            model=first.model or self._only_model(),
            choices=len(ask.requests) * first.choices,
            include_usage=ask.include_usage,
            receipts=request.headers.get(RECEIPT_HEADER) == "1",
            logprobs=first.sampling.logprobs,
        )
        session = next(filter(None, map(request.headers.get, SESSION_HEADERS)), first.session)
        streams = [self._pipeline.generate(replace(each, session=session)) for each in ask.requests]
        answer = Answer(style, head, choices_per_prompt=first.choices)
        return Exchange(
            merged(streams, first.choices),
            answer,
            stream=ask.stream,
            timeout_s=self._limits.request_timeout_s + LINGER_S,
            write_timeout_s=self._limits.write_timeout_s,
        )

    def _only_model(self) -> str:
        names = [model.name for model in self._pipeline.models()]
        return names[0] if len(names) == 1 else ""


def _add_operation(app: FastAPI, ready: Callable[[], bool], registry: CollectorRegistry) -> None:
    async def alive() -> Response:
        return _json({"status": "ok"})

    async def readiness() -> Response:
        return _json({"status": "ready"}) if ready() else _json({"status": "not ready"}, 503)

    async def version() -> Response:
        return _json({"version": __version__})

    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    routes: dict[str, Callable[[], Awaitable[Response]]] = {
        "/health": alive,
        "/liveness": alive,
        "/readiness": readiness,
        "/version": version,
        "/metrics": metrics,
    }
    for path, handler in routes.items():
        app.add_api_route(path, handler, methods=["GET"], response_model=None)


def _model_body(model: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "radixmesh",
        "max_model_len": model.max_model_len,
        "ready_replicas": model.ready_replicas,
    }


def _json(body: Any, status: int = 200) -> Response:
    return Response(encode(body), status_code=status, media_type="application/json")


async def _on_error(request: Request, error: Exception) -> Response:
    del request
    meaning = as_mesh_error(error)
    status = meaning.status if isinstance(meaning, BadBody) else status_of(meaning)
    response = _json(error_body(meaning, status), status)
    response.headers.update(error_headers(meaning))
    return response


async def _on_http_exception(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    meaning = InvalidRequest(f"{HTTPStatus(status).phrase}: {request.method} {request.url.path}")
    return _json(error_body(meaning, status), status)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    del request, error
    return Response(status_code=499)  # nobody reads it
