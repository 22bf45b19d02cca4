"""Rendering: messages and tools to text and ids by the model's own chat template.

Invariants:

- The template alone decides about a BOS token: text is encoded without the tokenizer's own specials, so there is
  exactly one where the template writes one.
- What follows an assistant's reply in the template (its end-of-turn text) is known by rendering a probe once.
- Probes also find two demands that some templates make: that a message of tool calls has no text at all rather than an
  empty one, and that ids of tool calls have nine characters. Messages are put in that form before they are rendered.

Text that spells a special token becomes that token, whoever wrote it, as in vLLM and Transformers: what is trained is
what will be served. It does not know calls or histories.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jinja2

from agentjet.chat.message import Message
from agentjet.chat.reply_format import ReplyFormat
from agentjet.chat.tokenizer import Tokenizer
from agentjet.errors import BadRequestError, UserError

_CONTEXT_CHARS = 64
"""End of a text behind which more is encoded."""
_PROBE = "9f3ac1-probe"
_SHORT_ID_CHARS = 9
"""Length of the tool call ids that Mistral's templates insist on."""
_LONG_ID, _SHORT_ID = "call_01k0ajz9f3ac1_0", "9f3ac1id0"


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises UserError when the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer, *, reply_format: ReplyFormat | None = None) -> None:
        if not tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template; use an instruct model or add the template")
        self.tokenizer = tokenizer
        self.reply_format = reply_format or ReplyFormat.of(tokenizer.chat_template)
        """How the model writes what it says; told from the template where it is not given."""
        self._special_texts: dict[int, str] = {}
        self._ids: dict[int, int] = {}

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opens_reply: bool = True) -> str:
        """The conversation as text; with `opens_reply` it ends where the assistant's next reply begins.

        Raises BadRequestError when the template refuses the messages.
        """
        return self._render([self._adapted(message) for message in messages], tools, opens_reply)

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of rendered text, nothing added."""
        return self.shared(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_behind(self, before: str, text: str) -> tuple[int, ...]:
        """Ids of a text that stands behind another: some tokenizers put a space before one that stands alone."""
        if not text:
            return ()
        context = before[-_CONTEXT_CHARS:]
        short, whole = self.encode(context), self.encode(context + text)
        return whole[len(short) :] if whole[: len(short)] == short else self.encode(text)

    @cached_property
    def opening_ids(self) -> tuple[int, ...]:
        """What the tokenizer puts before a text that no template has rendered: a BOS token, or nothing."""
        plain = self.encode("x")
        whole = tuple(self.tokenizer.encode("x", add_special_tokens=True))
        places = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[: next(places, 0)]

    def shared(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The same ids as objects that all conversations share: long ones are copied in a tenth of the time."""
        return tuple(map(self._ids.setdefault, ids, ids))

    def decode(self, ids: Sequence[int], *, with_specials: bool = False) -> str:
        """Text of ids."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=not with_specials)

    def special_text(self, token: int) -> str:
        """Text of a special token; empty for an ordinary one."""
        text = self._special_texts.get(token)
        if text is None:
            text = "" if self.decode([token]) else self.decode([token], with_specials=True)
            self._special_texts[token] = text
        return text

    @cached_property
    def reply_end(self) -> str | None:
        """What the template writes after a reply, for example `<|im_end|>` and a newline; None if unknown."""
        conversation: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.render(conversation, opens_reply=False)
        except BadRequestError:
            return None
        before, found, end = text.rpartition(_PROBE)
        return end if before and found and end else None

    def forced_prefix(self, tool_name: str | None) -> str | None:
        """How a reply begins that has to call the named tool, or any; None if the format can not be forced."""
        return self.reply_format.forced_prefix(tool_name, self._prompt_end)

    @cached_property
    def _prompt_end(self) -> str:
        """A short prompt: it shows whether replies begin inside thinking."""
        try:
            return self.render([{"role": "user", "content": "x"}])
        except BadRequestError:
            return ""

    @cached_property
    def _wants_short_ids(self) -> bool:
        return not self._shows_call("", _LONG_ID) and self._shows_call("", _SHORT_ID)

    @cached_property
    def _wants_no_text(self) -> bool:
        call_id = _SHORT_ID if self._wants_short_ids else _LONG_ID
        return not self._shows_call("", call_id) and self._shows_call(None, call_id)

    def _shows_call(self, text: str | None, call_id: str) -> bool:
        """Whether a message of one tool call and this text is rendered with its call."""
        call = {"id": call_id, "type": "function", "function": {"name": _PROBE, "arguments": {}}}
        conversation: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "content": "x", "tool_call_id": call_id, "name": "x"},
        ]
        try:
            return _PROBE in self._render(conversation, (), True)
        except BadRequestError:
            return False

    def _adapted(self, message: Message) -> Message:
        """The message in the form that the template demands."""
        if "tool_calls" not in message and "tool_call_id" not in message:
            return message
        adapted = dict(message)
        if "tool_calls" in message and not message["content"] and self._wants_no_text:
            adapted["content"] = None
        if self._wants_short_ids:
            if "tool_calls" in message:
                adapted["tool_calls"] = [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]
            if "tool_call_id" in message:
                adapted["tool_call_id"] = _short_id(message["tool_call_id"])
        return adapted

    def _render(self, messages: Sequence[Message], tools: Sequence[Any], opens_reply: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=opens_reply, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise BadRequestError(f"messages: the model's chat template refuses them: {error}") from error


def _short_id(call_id: Any) -> str:
    """Nine letters and digits for an id; one that has them already stays."""
    text = str(call_id)
    if len(text) == _SHORT_ID_CHARS and text.isalnum():
        return text
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()[:_SHORT_ID_CHARS]
