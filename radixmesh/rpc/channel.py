"""Channels: keepalive, bounded messages, a connection of their own. Knows no service."""

from typing import Final

import grpc.aio

__all__ = ["MAX_MESSAGE_BYTES", "open_channel"]

MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

_OPTIONS: Final = (
    # A dead host is noticed although nothing is sent and no call runs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Channels to one address would share one connection, and its fate.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)


def open_channel(address: str) -> grpc.aio.Channel:
    """Return a channel to `host:port`; it connects at its first call. Close it after use."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)
