"""Field types that the records share.

Token ids and log-probs travel as typed binary: little-endian int32 and float32. In memory they are tuples, so that
records stay frozen, hashable in parts and comparable.
"""

import array
import math
import struct
import sys
from collections.abc import Iterable
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

_SWAP = sys.byteorder == "big"


def _pack(code: str, values: Iterable[float]) -> bytes:
    packed = array.array(code, values)
    if _SWAP:
        packed.byteswap()
    return packed.tobytes()


def _unpack(code: str, data: bytes, what: str) -> tuple[Any, ...]:
    values: array.array[Any] = array.array(code)
    if len(data) % values.itemsize:
        raise ValueError(f"{len(data)} bytes are not a whole number of {what}")
    values.frombytes(data)
    if _SWAP:
        values.byteswap()
    return tuple(values)


def _read_int32(value: Any) -> Any:
    if isinstance(value, bytes):
        return _unpack("i", value, "int32")
    return tuple(cast("list[Any]", value)) if isinstance(value, list | tuple) else value


def _read_float32(value: Any) -> Any:
    if isinstance(value, bytes):
        return _unpack("f", value, "float32")
    return tuple(map(as_float32, cast("list[Any]", value))) if isinstance(value, list | tuple) else value


def as_float32(value: float) -> float:
    """The nearest float32; out of range becomes an infinity, as in a cast."""
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def _write_int32(values: tuple[int, ...]) -> bytes:
    return _pack("i", values)


def _write_float32(values: tuple[float, ...]) -> bytes:
    return _pack("f", values)


def _binary(description: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "contentEncoding": "binary", "description": description})


Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Int32Array = Annotated[
    tuple[Int32, ...],
    BeforeValidator(_read_int32),
    PlainSerializer(_write_int32, return_type=bytes),
    _binary("msgpack bin of little-endian int32"),
]
"""Integers as little-endian int32 on the wire."""

TokenIds = Int32Array
"""Token ids, little-endian int32 on the wire."""

Float32Array = Annotated[
    tuple[float, ...],
    BeforeValidator(_read_float32),
    PlainSerializer(_write_float32, return_type=bytes),
    _binary("msgpack bin of little-endian float32"),
]
"""Numbers as little-endian float32 on the wire; in memory each is exactly a float32."""


def _read_tuple(value: Any) -> Any:
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


AsTuple = BeforeValidator(_read_tuple)
"""msgpack has arrays only; a tuple field reads them."""

Closed = Field(strict=False)
"""A StrEnum field reads the member's string."""
