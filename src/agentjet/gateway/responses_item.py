"""Items of OpenAI's Responses to chat messages: what an agent sends as `input`.

Invariants:

- The items of one reply, sent back in any of the forms that agents keep them in, are one assistant message: the one
  that inference stored. So the next call goes on from the exact tokens.
- Only text is read. An item, a part or a field that can not be shown to a model is refused by its place.

Which items are one reply is told by their order: thinking or a text opens the next one where a text stands already;
after a tool call everything up to its output belongs to it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.chat.message import Message
from agentjet.gateway.fault import ApiError, bad_field

_ROLES = ("user", "assistant", "system", "developer")
_FIELDS = {
    "message": frozenset(("type", "id", "status", "role", "content", "phase")),
    "reasoning": frozenset(("type", "id", "status", "summary", "content", "encrypted_content")),
    "function_call": frozenset(("type", "id", "status", "call_id", "name", "arguments")),
    "function_call_output": frozenset(("type", "id", "status", "call_id", "name", "output")),
}
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_THOUGHTS = {"reasoning_text": "text", "summary_text": "text"}


def messages_of(value: Any) -> tuple[Message, ...]:
    """The chat messages of an `input`, a text or a list of items. ApiError (400) that names the item at fault."""
    if isinstance(value, str):
        return ({"role": "user", "content": value},)
    if not isinstance(value, list):
        raise bad_field("input", f"has to be a text or a list of items, not {type(value).__name__}")
    conversation = _Conversation()
    for index, item in enumerate(value):
        conversation.add(item, f"input[{index}]")
    return tuple(conversation.messages)


class _Conversation:
    """Messages so far; the last one may be a reply that further items belong to."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._reply: Message | None = None

    def add(self, item: Any, where: str) -> None:
        """Takes the next item."""
        if not isinstance(item, Mapping):
            raise bad_field(where, f"has to be an object, not {type(item).__name__}")
        given = {name: value for name, value in item.items() if value is not None}
        kind = given.get("type", "message" if "role" in given else None)
        if not isinstance(kind, str) or kind not in _FIELDS:
            raise _unsupported(where, f"an item of type {kind!r} is not supported; there are {', '.join(_FIELDS)}")
        for name in given:
            if name not in _FIELDS[kind]:
                raise bad_field(f"{where}.{name}", "this field is not known here; leave it out")
        if kind == "message":
            self._message(given, where)
        elif kind == "reasoning":
            self._thinking(given, where)
        elif kind == "function_call":
            self._call(given, where)
        else:
            self._output(given, where)

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role, text = item.get("role"), _text(item.get("content", ""), _TEXTS, f"{where}.content")
        if role not in _ROLES:
            raise bad_field(f"{where}.role", f"{role!r} is not supported; use one of {', '.join(_ROLES)}")
        if role != "assistant":
            self._say({"role": role, "content": text})
            return
        reply = self._open_reply(closed_by=("content",))
        reply["content"] = reply.get("content", "") + text

    def _thinking(self, item: Mapping[str, Any], where: str) -> None:
        # What is encrypted was thought elsewhere; a summary only stands in for thoughts that are not shown.
        name = "content" if item.get("content") else "summary"
        text = _text(item.get(name, ""), _THOUGHTS, f"{where}.{name}")
        if not text:
            return
        reply = self._open_reply(closed_by=("content", "reasoning_content"))
        reply["reasoning_content"] = reply.get("reasoning_content", "") + text

    def _call(self, item: Mapping[str, Any], where: str) -> None:
        name, arguments = _string(item, "name", where), _string(item, "arguments", where)
        call = {"id": _string(item, "call_id", where), "type": "function"}
        reply = self._open_reply(closed_by=())
        reply.setdefault("content", "")
        reply.setdefault("tool_calls", []).append(call | {"function": {"name": name, "arguments": arguments}})

    def _output(self, item: Mapping[str, Any], where: str) -> None:
        text = _text(item.get("output", ""), _TEXTS, f"{where}.output")
        self._say({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})

    def _open_reply(self, *, closed_by: Sequence[str]) -> Message:
        """The reply that an item belongs to; a new one where one of the fields `closed_by` is there already."""
        reply = self._reply
        is_open = reply is not None and ("tool_calls" in reply or not any(name in reply for name in closed_by))
        if reply is None or not is_open:
            reply = self._reply = {"role": "assistant"}
            self.messages.append(reply)
        return reply

    def _say(self, message: Message) -> None:
        self.messages.append(message)
        self._reply = None


def _text(content: Any, kinds: Mapping[str, str], where: str) -> str:
    """A text, or the joined texts of a list of parts; `kinds` maps types of parts to the field with their text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, "has to be a text or a list of parts")
    return "".join(_part(part, kinds, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, kinds: Mapping[str, str], where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get(kinds.get(str(kind), "")) if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise _unsupported(where, f"a part of type {kind!r} is not supported; only text is")
    return text


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", f"has to be a text, not {type(value).__name__}")
    return value


def _unsupported(where: str, why: str) -> ApiError:
    return ApiError(400, "unsupported_message", f"{where}: {why}", param=where)
