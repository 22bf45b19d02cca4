"""Frames between a pool and its workers: four bytes of length, then msgpack."""

import asyncio
import socket
import struct
from typing import Any

import msgpack

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest result or message of a worker."""

_LENGTH = struct.Struct("!I")


def pack(message: dict[str, Any]) -> bytes:
    """A frame; TypeError or ValueError when the message holds what msgpack does not know or is too large."""
    body = msgpack.packb(message, use_bin_type=True) or b""
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes exceed the limit of {MAX_FRAME_BYTES} bytes for one message")
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> dict[str, Any] | None:
    """The next frame of a blocking socket; None at its end."""
    head = _exactly(sock, _LENGTH.size)
    body = None if head is None else _exactly(sock, _LENGTH.unpack(head)[0])
    return None if body is None else msgpack.unpackb(body, raw=False, strict_map_key=False)


async def read(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """The next frame of a stream; None at its end, and when it is cut short or too long to be one."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            return None
        return msgpack.unpackb(await reader.readexactly(length), raw=False, strict_map_key=False)
    except (asyncio.IncompleteReadError, ConnectionError, msgpack.UnpackException, ValueError):
        return None


def _exactly(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(count - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
