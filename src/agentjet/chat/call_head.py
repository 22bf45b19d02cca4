"""The head of a tool call: all that stands between its opening mark and its arguments, in it the tool's name.

Invariant: whether a head matches a text, or can not match it any more, is settled by the beginning of that text; what
follows changes nothing. So it does not matter in which pieces the text comes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from agentjet.chat.call_arguments import json_arguments, rest_of_object
from agentjet.chat.piece import ToolCall
from agentjet.chat.source import Machine, Source

_KEYS = ("name", "type", "id", "arguments", "parameters")
_ARGUMENTS = ("arguments", "parameters")
_JSON = json.JSONDecoder()


class Head(Protocol):
    """One way to begin a call."""

    def match(self, body: str) -> tuple[str, int] | None:
        """Name of the tool and position of the arguments, once the text after an opening mark shows them."""
        ...

    def is_viable(self, body: str) -> bool:
        """Whether more text may yet make it match, or make it whole."""
        ...

    def whole(self, body: str) -> ToolCall | None:
        """The call that a text is when its brackets are even, for one that is no head and arguments."""
        ...

    def arguments(self, source: Source, closings: Sequence[str], tool: Mapping[str, Any]) -> Machine[None]:
        """Reads the arguments, and what of the call follows them. `tool` is the tool's definition, or empty."""
        ...


class ObjectHead:
    """A JSON object: `{"name": "add", "arguments": {...}}`, or with `parameters`.

    Args:
        lead: Pattern of what may stand before the object.
        is_picky: Only an object that begins with a key of a call can be one; for formats in which any JSON answer
            looks like the beginning of a call.
    """

    def __init__(self, lead: str = "", *, is_picky: bool = False) -> None:
        opening = rf"\s*{lead}\s*"
        self._match = re.compile(
            opening + r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*'
            r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
        )
        keys = "|".join(key[:size] for key in _KEYS for size in range(len(key) + 1))
        rest = rf'(?:"(?:(?:{keys})|(?:{"|".join(_KEYS)})".*))?' if is_picky else ".*"
        lead_part = f"(?:{lead})?" if lead else ""
        self._viable = re.compile(rf"\s*{lead_part}\s*(?:\{{\s*{rest})?", re.DOTALL)

    def match(self, body: str) -> tuple[str, int] | None:
        """As `Head.match`."""
        found = self._match.match(body)
        return found and (found.group(1), found.end())

    def is_viable(self, body: str) -> bool:
        """As `Head.is_viable`."""
        return self._viable.fullmatch(body) is not None

    def whole(self, body: str) -> ToolCall | None:
        """As `Head.whole`: its name may follow the arguments, which may be missing, or a text that holds JSON."""
        if not self.is_viable(body):
            return None
        try:
            members = _members(body[body.index("{") :])
            name = json.loads(members["name"])
            arguments = next((members[key] for key in _ARGUMENTS if key in members), "{}")
            if arguments.startswith('"'):
                arguments = json.loads(arguments)
            is_call = isinstance(name, str) and bool(name) and isinstance(json.loads(arguments), dict)
        except (ValueError, KeyError, RecursionError):
            return None
        return ToolCall(name, arguments) if is_call else None

    def arguments(self, source: Source, closings: Sequence[str], tool: Mapping[str, Any]) -> Machine[None]:
        """As `Head.arguments`."""
        yield from json_arguments(source, closings, depth=1)
        yield from rest_of_object(source, closings)


class NamedHead:
    """A name and a JSON object, told apart by marks.

    Args:
        pattern: From the opening mark to the arguments, with the group `name`; holds no curly bracket.
    """

    def __init__(self, pattern: str) -> None:
        self._match = re.compile(pattern + r"\s*(?=\{)")

    def match(self, body: str) -> tuple[str, int] | None:
        """As `Head.match`."""
        found = self._match.match(body)
        return found and (found.group("name"), found.end())

    def is_viable(self, body: str) -> bool:
        """As `Head.is_viable`: while no arguments have begun and it is not too long for a name."""
        return "{" not in body and len(body) < 256

    def whole(self, body: str) -> ToolCall | None:
        """As `Head.whole`: never."""
        return None

    def arguments(self, source: Source, closings: Sequence[str], tool: Mapping[str, Any]) -> Machine[None]:
        """As `Head.arguments`."""
        yield from json_arguments(source, closings)


def _members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as it is written. ValueError where it is none."""
    json.loads(text)
    members: dict[str, str] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _JSON.raw_decode(text, at)
        start = _skip(text, _skip(text, at) + 1)
        _, end = _JSON.raw_decode(text, start)
        members[key] = text[start:end]
        at = _skip(text, end)
        at = _skip(text, at + 1) if text[at] == "," else at
    return members


def _skip(text: str, at: int) -> int:
    """The position of the next character that is no white space."""
    return len(text) - len(text[at:].lstrip(" \t\n\r"))
