"""Where each key of a TOML file stands, which `tomllib` does not tell.

Invariant: the file as a whole has already been parsed. Statements are cut at the first line with which `tomllib`
accepts them, so strings and arrays over several lines need no grammar of our own. A key inside an inline table has the
line of its statement.
"""

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, cast

Key = tuple[str, ...]


def key_lines(text: str) -> dict[Key, int]:
    """The line, counted from 1, of every table and key of a valid TOML document."""
    lines: dict[Key, int] = {}
    table: Key = ()
    for number, statement in _statements(text):
        parsed = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            table = max(_keys(parsed), key=len)
            for length in range(1, len(table) + 1):
                lines.setdefault(table[:length], number)
            continue
        for key in _keys(parsed):
            lines[table + key] = number
    return lines


def nearest_line(lines: Mapping[Key, int], key: Key) -> int | None:
    """The line of a key, else that of the innermost table around it that the file has."""
    for length in range(len(key), 0, -1):
        if key[:length] in lines:
            return lines[key[:length]]
    return None


def leaves(tree: Mapping[str, Any], prefix: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every key that holds no table, or an empty one, with its value."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(cast("Mapping[str, Any]", value), (*prefix, name))
        else:
            yield (*prefix, name), value


def _statements(text: str) -> Iterator[tuple[int, str]]:
    pending = ""
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if not pending:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            first = number
        pending += line + "\n"
        if _is_whole(pending):
            yield first, pending
            pending = ""


def _is_whole(statement: str) -> bool:
    try:
        tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _keys(tree: object, prefix: Key = ()) -> Iterator[Key]:
    """Every key, tables included."""
    if prefix:
        yield prefix
    if isinstance(tree, list):  # an array of tables
        for item in cast("list[object]", tree):
            if isinstance(item, dict):
                yield from _keys(cast("object", item), prefix)
    if isinstance(tree, dict):
        for name, value in cast("dict[str, object]", tree).items():
            yield from _keys(value, (*prefix, name))
