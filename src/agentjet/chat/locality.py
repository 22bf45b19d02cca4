"""Which chat templates can be rendered from a conversation's end alone, and that rendering.

The end is rendered behind an opening: the conversation's own system messages and tools, and one short user message.
What stands after the opening is what the whole rendering adds, if the template treats every message by itself and its
neighbours. That is found out by a battery of made conversations, apart for each set of traits, since many templates do
so until there is reasoning, or until tools are there.

Invariants:

- A template that fails for one made conversation is never rendered from the end for those traits.
- It is a finding and no proof, so whoever relies on it compares with the whole rendering now and then, and says
  `distrust` where they differ: from then on everything is rendered whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from agentjet.chat.conversation import Trait
from agentjet.chat.message import Message
from agentjet.chat.template import ChatTemplate
from agentjet.errors import BadRequestError

log = structlog.get_logger(__name__)

_ANCHOR: Message = {"role": "user", "content": "7c19e-anchor"}
_NUM_LONG_TURNS = 70
_SHAPES = ("uauauau",)
_SHAPES_WITH_CALLS = ("ucrcrcrau", "uprauprpr", "uaucruaucru", "ucrucrau", "uauaucr")
_TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Gives {name}.",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
        },
    }
    for name in ("weather", "time")
)


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of a conversation, rendered behind an opening."""

    opening: str
    """The rendering of the opening, up to where the assistant's reply begins."""
    text: str
    """What the reply and the messages after it add to that."""


def render_opening(template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Any], num_system: int) -> str:
    """Renders what ends are rendered behind; BadRequestError when the template refuses it."""
    return template.render([*messages[:num_system], _ANCHOR], tools)


def render_tail(
    template: ChatTemplate, messages: Sequence[Message], num_before: int, tools: Sequence[Any], num_system: int
) -> Tail | None:
    """Renders the messages from `num_before` on, a reply and what follows it.

    None when the template does not continue the opening. Raises BadRequestError when it refuses the end by itself.
    """
    start = render_opening(template, messages, tools, num_system)
    text = template.render([*messages[:num_system], _ANCHOR, *messages[num_before:]], tools)
    return Tail(start, text[len(start) :]) if text.startswith(start) else None


class Locality:
    """What was found out about one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._found: dict[tuple[Trait, bool, bool], bool] = {}
        self.num_distrusted = 0
        """Times that the whole rendering differed from that of the end."""

    def holds(self, traits: Trait, *, has_tools: bool, adds_user: bool) -> bool:
        """Whether such conversations may be rendered from their end; `adds_user`: a user message follows the reply."""
        if self.num_distrusted or Trait.UNUSUAL in traits:
            return False
        kind = (traits, has_tools, adds_user)
        if kind not in self._found:
            self._found[kind] = self._passes(traits, _TOOLS if has_tools else (), adds_user)
        return self._found[kind]

    def distrust(self) -> None:
        """The whole rendering says otherwise: never again."""
        self.num_distrusted += 1
        log.warning("a rendering of the end differed from the whole; conversations are rendered whole from now on")

    def _passes(self, traits: Trait, tools: Sequence[Any], adds_user: bool) -> bool:
        num_passed = 0
        for messages in _battery(traits):
            for num_before, size in _cuts(messages, adds_user):
                is_same = self._agrees(messages[:size], num_before, tools)
                if is_same is False:
                    return False
                num_passed += is_same is True
        return num_passed > 0

    def _agrees(self, messages: list[Message], num_before: int, tools: Sequence[Any]) -> bool | None:
        """Whether the end renders as in the whole; None where that would not be relied on."""
        num_system = int(messages[0]["role"] == "system")
        try:
            before, whole = (self._template.render(messages[:n], tools) for n in (num_before, len(messages)))
            tail = render_tail(self._template, messages, num_before, tools, num_system)
        except BadRequestError:
            return None
        return tail and whole == before + tail.text


def _battery(traits: Trait) -> Iterator[list[Message]]:
    shapes = _SHAPES_WITH_CALLS if Trait.CALLS in traits else _SHAPES
    long = (shapes[0][:-1] * _NUM_LONG_TURNS)[: 2 * _NUM_LONG_TURNS + 1]
    thinking = ("none",) if Trait.THINKING not in traits else ("field", "content", "first", "last", "none")
    for shape in (*shapes, long):
        for where in thinking[:1] if shape is long else thinking:
            system: list[Message] = [{"role": "system", "content": "Be brief."}] if Trait.SYSTEM in traits else []
            yield system + list(_made(shape, where))


def _made(shape: str, thinking: str) -> Iterator[Message]:
    """A conversation: u is a user message, a an answer, c one call, p two calls, r their results."""
    num_calls = 0
    places = [index for index, letter in enumerate(shape) if letter in "acp"]
    for index, letter in enumerate(shape):
        if letter == "u":
            yield {"role": "user", "content": f"question {index}"}
            continue
        if letter == "r":
            for call in range(num_calls):
                call_id = f"call{index - 1:04d}{call}"
                yield {"role": "tool", "content": f"result {index}", "tool_call_id": call_id, "name": "weather"}
            continue
        num_calls = "acp".index(letter)
        reply: Message = {"role": "assistant", "content": "" if letter == "c" else f"answer {index}"}
        if thinking == "field" or (thinking, index) in (("first", places[0]), ("last", places[-1])):
            reply["reasoning_content"] = f"thought {index}"
        elif thinking == "content":
            reply["content"] = f"<think>\nthought {index}\n</think>\n\n{reply['content']}"
        if num_calls:
            function = {"name": "weather", "arguments": {"x": f"place {index}"}}
            calls = [{"id": f"call{index:04d}{n}", "type": "function", "function": function} for n in range(num_calls)]
            reply["tool_calls"] = calls
        yield reply


def _cuts(messages: list[Message], adds_user: bool) -> Iterator[tuple[int, int]]:
    """Each reply's index with the size up to the next one; only the last of a long conversation."""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    ends = [*replies[1:], len(messages)]
    pairs = list(zip(replies, ends, strict=True))
    for num_before, size in pairs[-4:] if len(pairs) > _NUM_LONG_TURNS // 2 else pairs:
        added = {message["role"] for message in messages[num_before + 1 : size]}
        if added and ("user" in added) is adds_user:
            yield num_before, size
