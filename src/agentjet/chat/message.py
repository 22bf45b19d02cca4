"""OpenAI chat messages in one canonical form, for templates and for comparison.

Invariants:

- Differences without meaning vanish: a missing, null or listed text, a field that is null or empty, tool-call arguments
  as a JSON string or as an object, `developer` for `system`.
- A text of arguments that is no JSON, or nested too deeply to be written again, stays a text.
- Everything else takes part: role, text, tool calls with their ids, names, and fields unknown here, which templates may
  read. Two messages are the same history if and only if their canonical forms are equal.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentjet.errors import BadRequestError

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_KNOWN = ("role", "content", "tool_calls")
_MAX_DEPTH = 128
"""Of arguments; half of what can be written as JSON, for they stand inside other values."""


def normalise(message: Mapping[str, Any], where: str = "messages") -> Message:
    """The canonical form of a message.

    Raises BadRequestError, which names the field below `where`, for content that is not text and for unknown roles.
    """
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise BadRequestError(f"{where}.role: {role!r} is not supported; use one of {', '.join(ROLES)}")
    canonical: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    calls = message.get("tool_calls")
    if calls:
        canonical["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    if message.get("function_call"):
        raise BadRequestError(f"{where}.function_call is not supported; use tool_calls")
    if message.get("audio"):
        raise BadRequestError(f"{where}.audio is not supported; only text is")
    extra = {key: value for key, value in message.items() if key not in _KNOWN and value not in (None, "", [], {})}
    return canonical | extra


def normalise_all(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The canonical form of a conversation; BadRequestError as `normalise`, and when it is empty."""
    if not messages:
        raise BadRequestError("messages: there has to be at least one")
    return tuple(normalise(message, f"messages[{index}]") for index, message in enumerate(messages))


def digest(before: bytes, part: object) -> bytes:
    """A chain value: equal for two conversations if and only if all their parts so far are equal."""
    body = orjson.dumps(part, option=orjson.OPT_SORT_KEYS, default=str)
    return hashlib.blake2b(body, key=before, digest_size=16).digest()


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise BadRequestError(f"{where} has to be a text or a list of text parts")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get({"text": "text", "refusal": "refusal"}.get(str(kind), "")) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise BadRequestError(f"{where}: a part of type {kind!r} is not supported; only text is")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise BadRequestError(f"{where} has to be a list")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRequestError(f"{where}: only calls of a named function are supported")
    arguments = function.get("arguments")
    value = arguments_of(arguments) if isinstance(arguments, str) else arguments or {}
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function["name"], "arguments": value},
    }


def arguments_of(text: str) -> Any:
    """The value of a tool call's arguments, for templates want an object; the text itself where it has none."""
    try:
        value = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return text
    return text if _is_deep(value) else value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            return False
        parts = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for part in parts for one in part]
    return True
