"""Whether a rendering continues an earlier one and shows the reply that was given; what it adds then.

Invariants:

- A rendering continues an earlier one only if it begins with all of its text; the text is kept as digests, one for what
  each turn added.
- A reply is shown if its text is, up to white space at both ends, and its tool calls up to their spelling in JSON.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from agentjet.chat.message import Message, normalise
from agentjet.chat.reply_format import ReplyFormat
from agentjet.chat.tool_format import Tools

_MAX_ENDS = 64
"""Places in a rendering that are tried as the reply's end."""


@dataclass(frozen=True, slots=True)
class RenderedText:
    """A text that was rendered, as the digests of its pieces."""

    before: "RenderedText | None"
    start: int
    """Characters before the last piece."""
    size: int
    """Characters of the whole text."""
    digest: bytes
    """Of the last piece."""

    @classmethod
    def of(cls, piece: str, before: "RenderedText | None" = None) -> "RenderedText":
        """A piece, behind an earlier text."""
        start = before.size if before else 0
        return cls(before, start, start + len(piece), _digest(piece))

    def begins(self, text: str) -> bool:
        """Whether a text begins with this one."""
        node: RenderedText | None = self
        while node is not None and len(text) >= node.size and _digest(text[node.start : node.size]) == node.digest:
            node = node.before
        return node is None


def added_after(text: str, reply: Message, end: str, reply_format: ReplyFormat, tools: Tools = ()) -> str | None:
    """What a text that begins with a reply adds after the reply's last character; None when it shows another reply.

    `end` is what the template writes after a reply, `reply_format` how the model writes it, `tools` what it could call.
    """
    content = reply["content"]
    is_plain = "tool_calls" not in reply and "reasoning_content" not in reply
    if is_plain and text.startswith(end, len(content)) and text.startswith(content):
        return text[len(content) :]
    # The reply reads otherwise in the template than as sampled: see whether only its spelling differs.
    place = -1
    for _ in range(_MAX_ENDS):
        place = text.find(end, place + 1)
        if place < 0:
            return None
        if _shows(text[:place], reply, reply_format, tools):
            return text[place:]
    return None


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _shows(shown: str, reply: Message, reply_format: ReplyFormat, tools: Tools) -> bool:
    """Whether rendered text says what the reply says."""
    callable_tools = tools if "tool_calls" in reply else ()
    # The prompt may have ended inside an open mark of thinking: then the text begins inside it.
    said = (reply_format.parse(shown, callable_tools, is_thinking=is_thinking) for is_thinking in (False, True))
    return any(_spelling(one.message(id_prefix="")) == _spelling(reply) for one in said)


def _spelling(message: Message) -> tuple[str, str, list[Any]]:
    """A reply without what may differ: white space at the ends of its texts, JSON's spelling, ids of calls."""
    canonical = normalise(message)
    calls = [call["function"] for call in canonical.get("tool_calls", ())]
    return canonical["content"].strip(), canonical.get("reasoning_content", "").strip(), calls
