"""`docs/configuration.md` from the settings' own docstrings.

`python -m agentjet.config.reference docs/configuration.md` writes it; a test holds it current.
"""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from agentjet.config.settings import SwarmSettings

_HEAD = """\
# Configuration

Generated from the settings' docstrings by `python -m agentjet.config.reference`; do not edit.

One `swarm.toml` describes a whole swarm; every actor and command reads the same file. Each value can also be given by
an environment variable, `AGENTJET_` and the key with `__` for each dot (`AGENTJET_RUN__SEED=7`), or by `--set
run.seed=7`. The command line beats the environment, the environment beats the file. Paths in the file are relative to
its folder. An unknown key is an error that names the line and the nearest right one. Variables know no case; for a
model or pool with capitals that the file does not have, write its table small: `AGENTJET_models__Qwen__path`.

- `agentjet config show` prints every value and where it comes from.
- `agentjet config check --files` also looks for models, workflows, task files and parsers.
- Examples: `deploy/swarm.laptop.toml`, `deploy/swarm.gpu.toml`, `deploy/swarm.7b-32b.toml`.
"""
_FREE_NAMES = {"models": "NAME", "pools": "NAME"}


def reference() -> str:
    """The whole document."""
    return "\n".join([_HEAD, *_tables((), SwarmSettings)])


def _tables(key: tuple[str, ...], model: type[BaseModel]) -> Iterator[str]:
    values = {name: info for name, info in model.model_fields.items() if _section(info) is None}
    if key:
        yield f"## `[{'.'.join(key)}]`\n\n{_first_line(model)}\n"
    if values:
        yield "| key | type | default | |\n|---|---|---|---|"
        for name, info in values.items():
            yield f"| `{name}` | {_type(info)} | {_default(info)} | {_cell(info.description or '')} |"
        yield ""
    for name, info in model.model_fields.items():
        section = _section(info)
        if section is not None:
            free = (_FREE_NAMES[name],) if get_origin(info.annotation) is dict else ()
            yield from _tables((*key, name, *free), section)


def _section(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a table; None for a value."""
    kind: Any = info.annotation
    if get_origin(kind) is dict:
        kind = get_args(kind)[1]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _first_line(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip()


def _type(info: FieldInfo) -> str:
    bounds = [bound for bound in map(_bound, info.metadata) if bound]
    text = _name(info.annotation)
    return ", ".join([" ".join([text, *bounds[:1]]).strip(), *bounds[1:]])


def _bound(item: object) -> str:
    for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<=")):
        value = getattr(item, name, None)
        if value is not None:
            return f"{sign} {value:g}"
    return " ".join(filter(None, (_bound(inner) for inner in getattr(item, "metadata", ()))))


def _name(kind: Any) -> str:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _name(args[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(arg) for arg in args if arg is not type(None))
    if origin is tuple:
        return f"list of {_name(args[0])}"
    if origin is dict:
        return "table"
    names: dict[Any, str] = {str: "text", int: "whole number", float: "number", bool: "true, false", Path: "path"}
    return "secret" if kind is SecretStr else names[kind]


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is None or value in ("", (), {}) or isinstance(value, SecretStr):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference())
