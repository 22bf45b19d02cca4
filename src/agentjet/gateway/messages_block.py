"""Content blocks of Anthropic's Messages to chat messages, and replies to content blocks.

Invariants:

- The blocks of a reply, sent back whole or as they were streamed, are the assistant message that inference stored: so
  the next call goes on from the exact tokens. Texts of one kind in a reply are joined with nothing between.
- An input is an object, so arguments that the model broke stand in one, under `INVALID_JSON`, as Anthropic has agents
  send them. Sent back, they are the text again.
- Only what can be shown to a model is read. Any other block or field is refused by its place; `cache_control` is the
  one exception, for it changes no token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agentjet.chat.message import Message, arguments_of
from agentjet.gateway.fault import ApiError, bad_field

_FIELDS = {
    "text": frozenset(("text",)),
    "thinking": frozenset(("thinking", "signature")),
    "tool_use": frozenset(("id", "name", "input")),
    "tool_result": frozenset(("tool_use_id", "content", "is_error")),
}
_HARMLESS = frozenset(("type", "cache_control"))
_NEUTRAL: Mapping[str, Sequence[Any]] = {"citations": ([],), "caller": ({"type": "direct"},)}
_BLOCKS = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}
"""What may stand in a message of each role."""
_INVALID_JSON = "INVALID_JSON"
_ERROR_MARK = "Error: "
"""Stands before the text of a tool result that is an error, for templates know no such flag."""


def messages_of(turns: Sequence[Any]) -> tuple[Message, ...]:
    """The chat messages of a body's `messages`. ApiError (400) that names the block at fault."""
    messages: list[Message] = []
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        role, content = _turn(turn, where)
        if role == "user":
            messages += _of_user(blocks_in(content, "user", f"{where}.content"), f"{where}.content")
        elif role == "system":
            messages.append({"role": "system", "content": text_in(content, f"{where}.content")})
        elif messages and messages[-1]["role"] == "assistant":  # by this API's rule they are one turn
            _extend(messages[-1], blocks_in(content, "assistant", f"{where}.content"))
        else:
            messages.append({"role": "assistant", "content": ""})
            _extend(messages[-1], blocks_in(content, "assistant", f"{where}.content"))
    if not messages:
        raise bad_field("messages", "there has to be at least one")
    if messages[-1]["role"] == "assistant":
        raise bad_field("messages", "the last one is of the assistant; to begin its next reply is not supported")
    return tuple(messages)


def text_in(content: Any, where: str) -> str:
    """A text, or the joined texts of a list of text blocks. ApiError (400) otherwise."""
    return "".join(block["text"] for block in blocks_in(content, "system", where))


def blocks_in(content: Any, role: str, where: str) -> list[dict[str, Any]]:
    """The checked blocks of a message; a text is one block. Fields that are null are left out."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_field(where, f"has to be a text or a list of blocks, not {type(content).__name__}")
    return [_block(block, role, f"{where}[{index}]") for index, block in enumerate(content)]


def blocks_of(message: Mapping[str, Any], signature: str) -> list[dict[str, Any]]:
    """The content blocks of a reply."""
    blocks: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        blocks.append(opened("thinking", thinking=message["reasoning_content"], signature=signature))
    if message.get("content"):
        blocks.append(opened("text", text=message["content"]))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append(opened("tool_use", id=call["id"], name=function["name"], input=_input(function["arguments"])))
    return blocks


def opened(kind: str, **fields: Any) -> dict[str, Any]:
    """A block of a reply, with empty texts where no field is given."""
    empty: dict[str, dict[str, Any]] = {
        "text": {"text": "", "citations": None},
        "thinking": {"thinking": "", "signature": ""},
        "tool_use": {"input": {}},
    }
    return {"type": kind, **empty[kind], **fields}


def _turn(turn: Any, where: str) -> tuple[str, Any]:
    if not isinstance(turn, Mapping):
        raise bad_field(where, f"has to be an object with role and content, not {type(turn).__name__}")
    for name, value in turn.items():
        if name not in ("role", "content") and value is not None:
            raise bad_field(f"{where}.{name}", "this field is not known here; leave it out", code="unknown_parameter")
    role = turn.get("role")
    if role not in ("user", "assistant", "system"):
        raise bad_field(f"{where}.role", f"{role!r} is not supported; use user or assistant")
    return role, turn.get("content")


def _of_user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[Message]:
    """Tool messages, and a user message with the text behind them."""
    messages: list[Message] = []
    texts: list[str] = []
    for index, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            raise bad_field(f"{where}[{index}]", "a tool_result has to stand before the texts of its message")
        result = text_in(block.get("content", ""), f"{where}[{index}].content")
        if block.get("is_error") and not result.startswith(_ERROR_MARK):
            result = _ERROR_MARK + result
        messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
    if texts or not messages:
        messages.append({"role": "user", "content": "".join(texts)})
    return messages


def _extend(message: Message, blocks: Sequence[Mapping[str, Any]]) -> None:
    """Puts blocks of the assistant into its message."""
    for block in blocks:
        if block["type"] == "text":
            message["content"] += block["text"]
        elif block["type"] == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + block["thinking"]
        else:
            function = {"name": block["name"], "arguments": _arguments(block["input"])}
            message.setdefault("tool_calls", []).append({"id": block["id"], "type": "function", "function": function})


def _input(arguments: str) -> dict[str, Any]:
    value = arguments_of(arguments)
    return value if isinstance(value, dict) else {_INVALID_JSON: arguments}


def _arguments(given: Mapping[str, Any]) -> str:
    """The inverse of `_input`."""
    broken = given.get(_INVALID_JSON)
    return broken if isinstance(broken, str) and len(given) == 1 else orjson.dumps(given).decode()


def _block(block: Any, role: str, where: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if not isinstance(block, Mapping) or not isinstance(kind, str) or kind not in _BLOCKS[role]:
        why = f"a block of type {kind!r} is not supported here; only {', '.join(_BLOCKS[role])}"
        if kind == "redacted_thinking":
            why = "redacted_thinking was encrypted elsewhere and can not be shown to this model; leave it out"
        raise ApiError(400, "unsupported_message", f"{where}: {why}", param=where)
    fields = {name: value for name, value in block.items() if value is not None}
    for name, value in fields.items():
        if name not in _FIELDS[kind] and name not in _HARMLESS and value not in _NEUTRAL.get(name, ()):
            raise bad_field(f"{where}.{name}", "this field is not known here; leave it out", code="unknown_parameter")
    for name, of_kind in _types(kind):
        if not isinstance(fields.get(name), of_kind):
            raise bad_field(f"{where}.{name}", f"is missing or no {'object' if of_kind is dict else 'text'}")
    if not isinstance(fields.get("is_error", False), bool):
        raise bad_field(f"{where}.is_error", "has to be true or false")
    return fields


def _types(kind: str) -> tuple[tuple[str, type], ...]:
    """Fields that a block needs, and their types."""
    return {
        "text": (("text", str),),
        "thinking": (("thinking", str),),
        "tool_use": (("id", str), ("name", str), ("input", dict)),
        "tool_result": (("tool_use_id", str),),
    }[kind]
