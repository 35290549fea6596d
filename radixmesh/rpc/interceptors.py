"""What surrounds every handler: errors become statuses, request ids travel. Knows no service."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status

from radixmesh.errors import InvalidRequest, MeshError
from radixmesh.rpc.status import conceal, to_status
from radixmesh.telemetry.logs import new_request_id, request_id

__all__ = ["REQUEST_ID_KEY", "ErrorInterceptor"]

REQUEST_ID_KEY: Final = "x-request-id"

# Quoted: at run time gRPC's class takes no parameters.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """The outermost interceptor: whatever a handler raises reaches the client as a clean status.

    A MeshError becomes its rich status, also after messages were sent. Anything
    else is logged under an error id and becomes INTERNAL with that id and nothing
    of its text. The client's `x-request-id` (or a new one) names the call in logs
    and goes back in the trailing metadata.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """Wrap the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:  # unknown method; gRPC answers UNIMPLEMENTED
            return handler
        return _wrap(handler, str(handler_call_details.method))


class _Unreadable:
    """Stands for a request whose bytes are no message."""


def _read_or_say(read: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a reader that fails inside the handler, where an error gets its type."""
    if read is None:
        return None

    def attempt(raw: bytes) -> Any:
        try:
            return read(raw)
        except DecodeError:
            return _Unreadable()

    return attempt


def _wrap(handler: "Handler", method: str) -> "Handler":
    read = handler.request_deserializer
    coders = {
        "request_deserializer": read if handler.request_streaming else _read_or_say(read),
        "response_serializer": handler.response_serializer,
    }
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(
            _guard(_streamed(handler.stream_stream), method), **coders
        )
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _guard(_streamed(handler.unary_stream), method), **coders
        )
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler(_guard(handler.stream_unary, method), **coders)
    return grpc.unary_unary_rpc_method_handler(_guard(handler.unary_unary, method), **coders)


def _streamed(behaviour: Any) -> Behaviour:
    """Return a coroutine function for a handler that may be an async generator."""
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour  # type: ignore[no-any-return]

    async def write_all(request: Any, context: Context) -> None:
        # A cancel may land in the write: the generator must be closed all the same,
        # or what it holds is never released.
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _guard(behaviour: Any, method: str) -> Any:
    async def guarded(request: Any, context: Context) -> Any:
        current = _request_id(context)
        token = request_id.set(current)
        context.set_trailing_metadata(((REQUEST_ID_KEY, current),))
        try:
            if isinstance(request, _Unreadable):
                raise InvalidRequest("the request can't be read")  # noqa: TRY301
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise  # the handler chose its status itself
        except MeshError as error:
            await _abort(context, error, current)
        except Exception as error:  # noqa: BLE001 - logged by conceal
            await _abort(context, conceal(error, method), current)
        finally:
            request_id.reset(token)

    return guarded


async def _abort(context: Context, error: MeshError, current: str) -> None:
    status = rpc_status.to_status(to_status(error))
    trailing = (*(status.trailing_metadata or ()), (REQUEST_ID_KEY, current))
    try:
        await context.abort(status.code, status.details, trailing)
    except grpc.aio.InternalError:
        # The client left in this very moment: nobody is to be told, and nothing to be logged.
        raise asyncio.CancelledError from None


def _request_id(context: Context) -> str:
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str):
            return new_request_id(value)
    return new_request_id()
