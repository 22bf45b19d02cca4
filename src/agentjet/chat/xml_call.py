"""Tool calls as Qwen3-Coder writes them: `<function=add><parameter=a>1</parameter></function>`.

The arguments are made from the parameters: text where the tool's schema says so or where a value is no JSON, else the
value as it is written. A parameter is given out when it is whole; the object is closed only if the call is.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.chat.piece import Piece, PieceKind, ToolCall
from agentjet.chat.source import Machine, Source, first_mark, skip_white

_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_MAX_NAME = 256


class XmlHead:
    """`<function=NAME>`; a `Head`."""

    _match = re.compile(rf"\s*{_FUNCTION}([^<>\s]+)>")

    def match(self, body: str) -> tuple[str, int] | None:
        """As `Head.match`."""
        found = self._match.match(body)
        return found and (found.group(1), found.end())

    def is_viable(self, body: str) -> bool:
        """As `Head.is_viable`."""
        return _is_beginning(body.lstrip(), _FUNCTION)

    def whole(self, body: str) -> ToolCall | None:
        """As `Head.whole`: never."""
        return None

    def arguments(self, source: Source, closings: Sequence[str], tool: Mapping[str, Any]) -> Machine[None]:
        """As `Head.arguments`."""
        schema = tool.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        before = "{"
        while True:
            yield from skip_white(source)
            text = source.text
            if text.startswith((_FUNCTION_END, *closings)):
                source.take(len(_FUNCTION_END) if text.startswith(_FUNCTION_END) else 0)
                yield Piece(PieceKind.ARGUMENTS, "{}" if before == "{" else "}")
                return
            end = first_mark(text, (_PARAMETER_END, _FUNCTION_END, *closings)) if text.startswith(_PARAMETER) else None
            if end is not None or (source.is_over and text.startswith(_PARAMETER)):
                key, _, value = source.take(end[0] if end else len(text))[len(_PARAMETER) :].partition(">")
                source.take(len(_PARAMETER_END) if end and end[1] == _PARAMETER_END else 0)
                value = value.removeprefix("\n").removesuffix("\n")
                yield Piece(PieceKind.ARGUMENTS, f"{before}{_text(key)}: {_value(value, _type(properties, key))}")
                before = ", "
            elif source.is_over or not any(
                mark.startswith(text[: len(mark)]) for mark in (_PARAMETER, _FUNCTION_END, *closings)
            ):
                return
            else:
                yield None


def _is_beginning(text: str, mark: str) -> bool:
    """Whether a text begins a mark, or is one and the beginning of a name."""
    return mark.startswith(text) or (text.startswith(mark) and ">" not in text and len(text) < _MAX_NAME)


def _type(properties: Any, key: str) -> Any:
    of = properties.get(key) if isinstance(properties, Mapping) else None
    return of.get("type") if isinstance(of, Mapping) else None


def _value(value: str, kind: Any) -> str:
    if kind != "string":
        try:
            json.loads(value)
        except (ValueError, RecursionError):
            return _text(value)
        return value
    return _text(value)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
