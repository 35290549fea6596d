"""Frames on a stream socket: 4 bytes of little-endian length, then the body.

Used between front and rank (0, 0) and by the local broadcast. Knows lengths and
bounds; knows neither sockets nor what a body means.
"""

import struct
from typing import Final

HEADER: Final = struct.Struct("<I")
MAX_BODY_BYTES: Final = 64 << 20


class FramingError(Exception):
    """The peer sent a length that cannot be."""


def frame(body: bytes) -> bytes:
    """Return the body with its length in front.

    Raises:
        FramingError: The body is larger than any reader takes.
    """
    if len(body) > MAX_BODY_BYTES:
        raise FramingError(f"a frame of {len(body)} bytes exceeds {MAX_BODY_BYTES}")
    return HEADER.pack(len(body)) + body


class FrameSplitter:
    """Cuts a byte stream into bodies, whatever the pieces are in which it arrives."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take more bytes, return the bodies that are whole now.

        Raises:
            FramingError: A length exceeds the bound; the stream is lost.
        """
        self._buffer += data
        bodies = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, start)
            if size > MAX_BODY_BYTES:
                raise FramingError(f"a frame of {size} bytes exceeds {MAX_BODY_BYTES}")
            end = start + HEADER.size + size
            if end > len(self._buffer):
                break
            bodies.append(bytes(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return bodies
