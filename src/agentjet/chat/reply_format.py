"""How one model writes its replies: the marks of its thinking and of its tool calls.

Both are told from the chat template, unless a setting names them. Whole replies are read by the same machine as those
that stream, so the two agree; a machine that finds its source over before it has read any of it has a whole reply.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from agentjet.chat.piece import Piece, PieceKind, Reply
from agentjet.chat.source import Machine, Source
from agentjet.chat.thinking import THINKING, ThinkingFormat, detect_thinking
from agentjet.chat.tool_family import FORMATS, detect_format
from agentjet.chat.tool_format import ToolFormat, Tools
from agentjet.errors import UserError

T = TypeVar("T")
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """What is read in the replies of a model."""

    calls: ToolFormat | None
    """None: tool calls are text."""
    thinking: ThinkingFormat | None
    """None: the model does not think, or its thinking is text."""

    @classmethod
    def of(cls, chat_template: str, *, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> "ReplyFormat":
        """The formats that are named; `auto` takes what the template shows, `none` reads nothing.

        Raises UserError for a name that is not known.
        """
        calls = detect_format(chat_template) if tool_parser == AUTO else tool_parser
        thinking = detect_thinking(chat_template) if reasoning_parser == AUTO else reasoning_parser
        return cls(_named(FORMATS, calls, "tool_parser"), _named(THINKING, thinking, "reasoning_parser"))

    def marks(self, *, has_tools: bool) -> tuple[str, ...]:
        """Texts that have to be seen in a reply, though they may be special tokens."""
        calls = self.calls.marks if self.calls and has_tools else ()
        return calls + (self.thinking.marks if self.thinking else ())

    def forced_prefix(self, tool_name: str | None, prompt: str = "") -> str | None:
        """How a reply to `prompt` begins that has to call the named tool, or any; None if that can not be forced."""
        forced = self.calls.forced_prefix(tool_name) if self.calls else None
        before = self.thinking.forced_prefix(prompt) if self.thinking else ""
        return None if forced is None or before is None else before + forced

    def read(self, source: Source, tools: Tools, *, is_thinking: bool) -> Machine[None]:
        """Thinking, text and calls up to the end of the source."""
        if self.thinking is not None:
            yield from self.thinking.read(source, is_open=is_thinking)
        if self.calls is not None and tools:
            yield from self.calls.read(source, tools)
            return
        while True:
            yield Piece(PieceKind.TEXT, source.take(len(source.text)))
            if source.is_over:
                return
            yield None

    def parse(self, text: str, tools: Tools = (), *, is_thinking: bool = False) -> Reply:
        """A whole reply; `is_thinking` tells that its prompt ends inside an open mark of thinking."""
        parser = ReplyParser(self, tools, is_thinking=is_thinking)
        reply = Reply()
        reply.add(parser.finish(text))
        return reply


PLAIN = ReplyFormat(None, None)
"""All is text."""


class ReplyParser:
    """Reads one reply while it streams in."""

    def __init__(self, reply_format: ReplyFormat, tools: Tools = (), *, is_thinking: bool = False) -> None:
        self._source = Source()
        self._machine = reply_format.read(self._source, tools, is_thinking=is_thinking)

    def feed(self, text: str) -> list[Piece]:
        """Takes the next text and returns what is certain by now."""
        self._source.text += text
        return self._certain()

    def finish(self, text: str = "") -> list[Piece]:
        """Takes the last text and returns the rest."""
        self._source.text += text
        self._source.is_over = True
        return self._certain()

    def _certain(self) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in self._machine:
            if piece is None:
                break
            if piece.text or piece.kind is PieceKind.CALL:
                pieces.append(piece)
        return pieces


def _named(known: Mapping[str, T], name: str | None, setting: str) -> T | None:
    if name is None or name == NONE:
        return None
    if name not in known:
        raise UserError(f"{setting}: {name!r} is not known; use one of: {', '.join([AUTO, NONE, *known])}, vllm:NAME")
    return known[name]
