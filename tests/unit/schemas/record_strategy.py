"""Strategies for every record, built from its pydantic fields."""

import types
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from agentjet.schemas import field as fields
from agentjet.schemas.record import Part

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
INT32 = st.integers(-(2**31), 2**31 - 1)
FLOAT = st.floats(allow_nan=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | FLOAT | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=3,
)
BINARY = {
    fields._read_int32: st.lists(INT32, max_size=4).map(tuple),
    fields._read_float32: st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(tuple),
}


def records(cls: type[Part]) -> st.SearchStrategy[Any]:
    """Any valid value of a record or part."""
    cls.model_rebuild()
    given = {name: of_field(info) for name, info in cls.model_fields.items()}
    required = {name: given[name] for name, info in cls.model_fields.items() if info.is_required()}
    optional = {name: strategy for name, strategy in given.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: cls(**values))


def of_field(info: FieldInfo) -> st.SearchStrategy[Any]:
    return of_type(info.annotation, info.metadata)


def of_type(kind: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    for item in metadata:
        binary = BINARY.get(getattr(item, "func", None))
        if binary is not None:
            return binary
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return of_type(args[0], list(args[1:]))
    if hasattr(kind, "__supertype__"):
        return of_type(kind.__supertype__, metadata)
    if origin in (Union, types.UnionType):
        return st.one_of(*(of_type(arg, metadata) for arg in args))
    if origin is tuple:
        return st.lists(of_type(args[0], []), max_size=2).map(tuple)
    if origin is dict:
        return st.dictionaries(of_type(args[0], []), of_type(args[1], []), max_size=2)
    if kind is Any or kind is object:
        return JSON
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, Part):
        return records(kind)
    return {
        str: TEXT,
        bool: st.booleans(),
        type(None): st.none(),
        int: _bounded(st.integers, metadata, 2**63 - 1),
        float: _bounded(st.floats, metadata, None),
    }[kind]


def _bounded(make: Any, metadata: list[Any], most: int | None) -> st.SearchStrategy[Any]:
    low, high = (None, None) if most is None else (-most, most)
    for item in metadata:
        for bound in getattr(item, "metadata", [item]):
            if isinstance(bound, annotated_types.Ge):
                low = bound.ge
            elif isinstance(bound, annotated_types.Gt):
                low = bound.gt + 1e-9 if make is st.floats else bound.gt + 1
            elif isinstance(bound, annotated_types.Le):
                high = bound.le
            elif isinstance(bound, annotated_types.Lt):
                high = bound.lt - 1
    if make is st.floats:
        return st.floats(low, high, allow_nan=False)
    return st.integers(low, high)
