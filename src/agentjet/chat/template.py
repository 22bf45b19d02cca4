"""Rendering: messages and tools to text and ids by the model's own chat template.

Invariants:

- The template alone decides about a BOS token: text is encoded without the tokenizer's own specials, so there is
  exactly one where the template writes one.
- What follows an assistant's reply in the template (its end-of-turn text) is known by rendering a probe once.

It does not know calls or histories.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jinja2

from agentjet.chat.message import Message
from agentjet.chat.tokenizer import Tokenizer
from agentjet.errors import BadRequestError, UserError

_PROBE = "9f3ac1-probe"


class ChatTemplate:
    """The chat template of a tokenizer.

    Raises UserError when the tokenizer has none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not tokenizer.chat_template:
            raise UserError("the model's tokenizer has no chat template; use an instruct model or add the template")
        self.tokenizer = tokenizer

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, opens_reply: bool = True) -> str:
        """The conversation as text; with `opens_reply` it ends where the assistant's next reply begins.

        Raises BadRequestError when the template refuses the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=opens_reply, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError) as error:
            raise BadRequestError(f"messages: the model's chat template refuses them: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of rendered text, nothing added."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], *, with_specials: bool = False) -> str:
        """Text of ids."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=not with_specials)

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
