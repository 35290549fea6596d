"""A gRPC server: services, health, reflection, keepalive, drain. Knows no service's meaning."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from radixmesh.rpc.channel import MAX_MESSAGE_BYTES
from radixmesh.rpc.interceptors import ErrorInterceptor

__all__ = ["Health", "Register", "Server"]

logger = logging.getLogger(__name__)

Register = Callable[[grpc.aio.Server], None]

_MAX_PENDING_CALLS: Final = 32_768
_OPTIONS: Final = (
    # On by default, and then a second server on the port silently takes half the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients may ping during long silent prefills without being sent away.
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Of calls that wait to be picked up gRPC cancels some, at random and without a reason,
    # from 1 000 on. A burst is for admission to judge; this only bounds memory.
    ("grpc.server.max_pending_requests", _MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_CALLS),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


class Health:
    """grpc.health.v1: the empty name says that the process lives, a service's that it takes work.

    A service is NOT_SERVING until it is set.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._servicer = health.aio.HealthServicer()

    async def register(self, server: grpc.aio.Server) -> None:
        """Add the service to a server that has not started."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        for name in self._names:
            await self.set(name, False)

    async def set(self, name: str, serving: bool) -> None:
        """Say whether a service can take work now."""
        states = health_pb2.HealthCheckResponse
        await self._servicer.set(name, states.SERVING if serving else states.NOT_SERVING)

    async def leave(self) -> None:
        """Say NOT_SERVING for every name, for good."""
        await self._servicer.enter_graceful_shutdown()


class Server:
    """A gRPC server with health and reflection.

    Args:
        address: `host:port`; port 0 takes a free one.
        services: Each one's full name, and the function that adds it to a server.
        interceptors: Inside the one that translates errors.
    """

    def __init__(
        self,
        address: str,
        services: Sequence[tuple[str, Register]],
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.address = address
        self.port = 0
        self.health = Health([name for name, _ in services])
        self._services = services
        self._interceptors = (ErrorInterceptor(), *interceptors)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> int:
        """Listen; return the port.

        Raises:
            OSError: The address can't be had.
        """
        server = grpc.aio.server(interceptors=self._interceptors, options=_OPTIONS)
        for _, register in self._services:
            register(server)
        await self.health.register(server)
        names = [name for name, _ in self._services]
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server
        )
        try:
            self.port = server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {self.address}") from error
        await server.start()
        self._server = server
        logger.info("listening", extra={"address": self.address, "port": self.port})
        return self.port

    async def drain(self, settle_s: float = 0.0) -> None:
        """Say NOT_SERVING, and go on serving for `settle_s` until callers have seen it."""
        await self.health.leave()
        await asyncio.sleep(settle_s)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no new calls, wait for running ones up to `grace_s`, cancel the rest.

        A link is a call that does not end by itself: end sessions first, or give no grace.
        """
        if self._server is None:
            return
        await self.health.leave()
        await self._server.stop(grace_s)
        self._server = None
