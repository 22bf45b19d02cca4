"""Records as JSON for people: arrays as lists of numbers, nothing abbreviated."""

import math
from enum import Enum
from typing import Any, cast

from pydantic import BaseModel

from agentjet.schemas.record import Record


def as_json(record: Record) -> dict[str, Any]:
    """The record's fields as JSON values; a number that JSON lacks becomes null. Bytes become hexadecimal."""
    return {"schema": record.schema_header(), **cast("dict[str, Any]", _value(record))}


def _value(value: object) -> object:
    if isinstance(value, BaseModel):
        return {name: _value(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {str(key): _value(item) for key, item in cast("dict[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_value(item) for item in cast("list[object]", value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    return value.value if isinstance(value, Enum) else value
