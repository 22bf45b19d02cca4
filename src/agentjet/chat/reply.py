"""Sampled ids to what the agent sees: text without broken characters or stop strings, and tool calls.

Invariants:

- The pieces given out while a reply streams, joined, are the content of the finished message.
- A character is given out only when all its bytes are there; text that may begin a stop string is held back.
- The end-of-turn token and other special tokens are no text. Ids are never changed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from agentjet.chat.parser import ReplyParser, ToolCall, parse_reply
from agentjet.chat.template import ChatTemplate

_BROKEN = "\ufffd"


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A whole reply."""

    content: str
    calls: list[ToolCall]
    rest: str
    """Content that was not given out before."""
    is_drifted: bool
    """Encoding the text gives other ids than those sampled."""


class ReplyStream:
    """Turns the draws of one generation into content."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        stop_ids: frozenset[int] = frozenset(),
        stop_strings: Sequence[str] = (),
        has_tools: bool = False,
    ) -> None:
        self._template = template
        self._stop_ids = stop_ids
        self._stop_strings = tuple(stop_strings)
        self._has_tools = has_tools
        self._parser = ReplyParser(has_tools=has_tools)
        self._ids: list[int] = []
        self._prefix = self._read = 0
        self._held = ""
        self._given = ""

    def feed(self, ids: Sequence[int]) -> str:
        """Takes drawn ids and returns the content that is certain by now."""
        self._ids += [token for token in ids if token not in self._stop_ids]
        self._held += self._new_text()
        size = len(self._held) - self._num_doubtful(self._held)
        content = self._parser.feed(self._held[:size])
        self._held = self._held[size:]
        self._given += content
        return content

    def finish(self, ids: Sequence[int], stop_string: str | None = None) -> FinishedReply:
        """The whole reply from all of its ids, whether or not they were fed."""
        spoken = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        text = self._template.decode(spoken)
        is_drifted = self._template.encode(text) != tuple(spoken)
        if stop_string is not None:
            text = text.partition(stop_string)[0]
        content, calls = parse_reply(text, has_tools=self._has_tools)
        return FinishedReply(content, calls, content[len(self._given) :], is_drifted)

    def _new_text(self) -> str:
        # The last token given out is decoded again with the new ones: some decoders join a token to the one before.
        before = self._template.decode(self._ids[self._prefix : self._read])
        text = self._template.decode(self._ids[self._prefix :])
        if len(text) <= len(before) or text.endswith(_BROKEN):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]

    def _num_doubtful(self, text: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = 0
        for stop in self._stop_strings:
            if stop in text:
                return len(text) - text.index(stop)
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop.startswith(text[-size:]):
                    longest = size
                    break
        return longest
