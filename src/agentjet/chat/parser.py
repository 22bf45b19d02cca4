"""Reply text to an assistant message: Hermes and Qwen style tool calls, whole or as it streams.

`<tool_call>` `{"name": ..., "arguments": {...}}` `</tool_call>`, any number of them, becomes OpenAI tool calls.

Invariants:

- The result depends on the text only, not on how it is cut into pieces.
- A block that is not a well-formed call stays in the text, unchanged; nothing raises.
- No text is given out that may later turn out to belong to a call, nor whitespace that stands before one.

Reasoning is not split off here; a stage that does stands before this one and feeds it the rest.
"""

from dataclasses import dataclass
from typing import Any

import orjson

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object."""


class ReplyParser:
    """Splits one reply into text and tool calls while it streams in."""

    def __init__(self, *, has_tools: bool) -> None:
        self.calls: list[ToolCall] = []
        self._has_tools = has_tools
        self._pending = ""

    def feed(self, text: str) -> str:
        """Takes the next piece and returns the content text that is certain by now."""
        if not self._has_tools:
            return text
        self._pending += text
        out = []
        while True:
            start = self._pending.find(OPEN)
            if start < 0:
                out.append(self._take(_num_certain(self._pending)))
                break
            end = self._pending.find(CLOSE, start)
            if end < 0:
                # Whitespace before the block is dropped if the block is a call, so it waits as well.
                out.append(self._take(len(self._pending[:start].rstrip())))
                break
            out.append(self._block(start, end))
        return "".join(out)

    def finish(self) -> str:
        """The rest of the content; a call that is whole but for its closing mark still counts."""
        rest, self._pending = self._pending, ""
        if not rest:
            return ""
        before, mark, body = rest.partition(OPEN)
        call = _read_call(body) if mark else None
        if call is not None:
            self.calls.append(call)
            return before.rstrip()
        return "" if self.calls and not rest.strip() else rest

    def _block(self, start: int, end: int) -> str:
        before = self._pending[:start]
        call = _read_call(self._pending[start + len(OPEN) : end])
        if call is None:
            return self._take(end + len(CLOSE))
        self._pending = self._pending[end + len(CLOSE) :]
        self.calls.append(call)
        return before.rstrip()

    def _take(self, num_characters: int) -> str:
        taken, self._pending = self._pending[:num_characters], self._pending[num_characters:]
        return taken


def parse_reply(text: str, *, has_tools: bool) -> tuple[str, list[ToolCall]]:
    """Content and tool calls of a whole reply."""
    parser = ReplyParser(has_tools=has_tools)
    content = parser.feed(text) + parser.finish()
    return content, parser.calls


def assistant_message(content: str, calls: list[ToolCall], *, id_prefix: str) -> dict[str, Any]:
    """The OpenAI assistant message; tool calls are numbered behind `id_prefix`."""
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if calls:
        message["tool_calls"] = [
            {
                "id": f"{id_prefix}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
        ]
    return message


def _num_certain(text: str) -> int:
    """Characters that come before trailing whitespace and before a trailing beginning of the opening mark."""
    for size in range(min(len(OPEN) - 1, len(text)), 0, -1):
        if OPEN.startswith(text[-size:]):
            text = text[:-size]
            break
    return len(text.rstrip())


def _read_call(body: str) -> ToolCall | None:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return _with_text_arguments(value["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return ToolCall(value["name"], orjson.dumps(arguments).decode())


def _with_text_arguments(name: str, arguments: str) -> ToolCall | None:
    """Some models write the arguments as a JSON text."""
    try:
        is_object = isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return None
    return ToolCall(name, arguments) if is_object else None
