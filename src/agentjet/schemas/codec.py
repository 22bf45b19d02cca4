"""Records to bytes and back: a msgpack map of the fields, the schema's name and version in a header.

Unknown fields of a newer minor are ignored; a wrong type, a broken body or an unknown schema is refused by a named
error. Decoding never raises anything else.
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
from pydantic import ValidationError

from agentjet.errors import RecordError, RecordTooLargeError, UnknownSchemaError
from agentjet.schemas.record import REGISTRY, Record

SCHEMA_HEADER = "AJ-Schema"
MODULES = (
    "call",
    "checkpoint",
    "claim",
    "episode",
    "event",
    "judgement",
    "ledger",
    "presence",
    "room",
    "sample",
    "score",
    "task",
    "weights",
)
"""Modules of this package that define records; importing them fills the registry."""

R = TypeVar("R", bound=Record)

_pack = cast("Callable[..., bytes]", msgpack.packb)  # pyright: ignore[reportUnknownMemberType]
_unpack = cast("Callable[..., object]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def registry() -> Mapping[str, type[Record]]:
    """Every record class by schema name."""
    _import_all()
    return REGISTRY


@cache
def _import_all() -> None:
    """Once: looking the modules up takes longer than decoding a record."""
    for module in MODULES:
        import_module(f"agentjet.schemas.{module}")


def encode(record: Record, *, max_bytes: int | None = None) -> tuple[dict[str, str], bytes]:
    """Headers and body of a record.

    Raises RecordTooLargeError when the body exceeds `max_bytes`.
    """
    body = _pack(record.model_dump(mode="python"), use_bin_type=True)
    if max_bytes is not None and len(body) > max_bytes:
        raise RecordTooLargeError(
            f"a {record.schema_name} record of {len(body)} bytes exceeds the payload limit of {max_bytes} bytes"
        )
    return {SCHEMA_HEADER: record.schema_header()}, body


def decode(headers: Mapping[str, str], body: bytes) -> Record:
    """The record in a message.

    Raises UnknownSchemaError for a schema or major version not known here, RecordError for everything else wrong.
    """
    name, major = _schema(headers)
    cls = registry().get(name)
    if cls is None or major != cls.schema_version[0]:
        raise UnknownSchemaError(
            f"schema {headers[SCHEMA_HEADER]!r} is not known here; a newer AgentJet wrote it: upgrade this one"
        )
    return _validate(cls, body)


def decode_as(cls: type[R], headers: Mapping[str, str], body: bytes) -> R:
    """As `decode`, and RecordError when the message holds another schema than that of `cls`."""
    record = decode(headers, body)
    if not isinstance(record, cls):
        raise RecordError(f"expected a {cls.schema_name} record, found {record.schema_name}")
    return record


def _schema(headers: Mapping[str, str]) -> tuple[str, int]:
    text = headers.get(SCHEMA_HEADER)
    if text is None:
        raise RecordError(f"the message has no {SCHEMA_HEADER} header")
    name, _, version = text.partition("/")
    major = version.split(".")[0]
    if not name or not (major.isascii() and major.isdecimal() and len(major) < 10):
        raise RecordError(f"{SCHEMA_HEADER} {text!r} is not <name>/<major>.<minor>")
    return name, int(major)


def _validate(cls: type[Record], body: bytes) -> Record:
    try:
        fields = _unpack(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise RecordError(f"the body of a {cls.schema_name} record is not msgpack: {error}") from None
    if not isinstance(fields, dict):
        raise RecordError(f"the body of a {cls.schema_name} record is not a map")
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise RecordError(f"{cls.schema_name} record, field {where}: {first['msg']}") from None
