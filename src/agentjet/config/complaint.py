"""What is wrong with a configuration, as one sentence that says where and what to do."""

import difflib
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from agentjet.config.line import Key
from agentjet.config.settings import SwarmSettings


def complaint(error: ValidationError, place: Callable[[Key], str | None]) -> str:
    """The first error as a sentence, and how many more there are.

    Args:
        error: From validating `SwarmSettings`.
        place: Where a key was written, for example `swarm.toml:12`; None when nowhere.
    """
    errors = error.errors(include_url=False)
    first = errors[0]
    key = tuple(str(part) for part in first["loc"])
    problem = str(first["msg"]).removeprefix("Value error, ")
    if not key:  # a check of the whole file names its key itself
        key = tuple(problem.partition(":")[0].split("."))
    if first["type"] == "extra_forbidden":
        said = _unknown(key)
    elif first["type"] == "missing":
        said = f"[{'.'.join(key[:-1])}] lacks '{key[-1]}'"
    elif not first["loc"]:
        said = problem
    else:
        # A check of a whole table names its keys itself.
        is_shown = not _is_secret(key) and not isinstance(first["input"], Mapping)
        shown = f" (given: {first['input']!r})" if is_shown else ""
        said = f"{'.'.join(key)}: {_lower_first(problem)}{shown}"
    where = place(key)
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return (f"{_readable(where)}: " if where else "") + said + more


def _unknown(key: Key) -> str:
    table, name = key[:-1], key[-1]
    known = known_keys(table)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = f"did you mean '{near[0]}'?" if near else f"it takes {', '.join(known)}"
    if not table:
        return f"there is no section '{name}'; {hint}"
    return f"[{'.'.join(table)}] has no key '{name}'; {hint}"


def known_keys(table: Key) -> list[str]:
    """Names that a table takes; empty when its keys are free or it is no table."""
    model: Any = SwarmSettings
    for name in table:
        model = _value_type(model, name)
        if model is None:
            return []
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _value_type(model: Any, name: str) -> Any:
    if get_origin(model) is dict:
        return get_args(model)[1]
    if isinstance(model, type) and issubclass(model, BaseModel):
        field = model.model_fields.get(name)
        return None if field is None else field.annotation
    return None


def _is_secret(key: Key) -> bool:
    kind: Any = SwarmSettings
    for name in key:
        kind = _value_type(kind, name)
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return SecretStr in options


def _readable(where: str) -> str:
    name, colon, line = where.rpartition(":")
    return f"{name} line {line}" if colon and line.isdecimal() else where


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
