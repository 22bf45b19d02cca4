"""Sampled ids to what the agent sees: thinking, text and tool calls, without broken characters or stop strings.

Invariants:

- The deltas given out while a reply streams, joined, are the beginning of the finished reply.
- Text that may begin a stop string is held back. Ids are never changed here.
- A forced beginning of the reply is part of what the agent sees, though it was not sampled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agentjet.chat.piece import Piece, PieceKind, Reply, tool_call_id
from agentjet.chat.reply_decoder import ReplyDecoder
from agentjet.chat.reply_format import ReplyFormat, ReplyParser
from agentjet.chat.source import num_doubtful
from agentjet.chat.template import ChatTemplate
from agentjet.chat.tool_format import Tools
from agentjet.schemas.call import ToolCallDelta

_ORDER = {PieceKind.REASONING: 0, PieceKind.TEXT: 1, PieceKind.CALL: 2, PieceKind.ARGUMENTS: 2}


@dataclass(frozen=True, slots=True)
class ReplyDelta:
    """What became certain together; it is to be read in the order of the fields."""

    reasoning: str = ""
    text: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedReply:
    """A whole reply."""

    reply: Reply
    is_drifted: bool
    """Encoding the text gives other ids than those sampled."""


class ReplyStream:
    """Turns the draws of one generation into a reply.

    Args:
        template: Of the model.
        tools: That the model may call; without any, what reads like a call is text.
        prompt: Text that the prompt ends with; it tells whether the reply begins inside thinking.
        forced: Beginning of the reply that belongs to the prompt.
        stop_ids: Tokens that end a reply.
        stop_strings: Texts that end a reply.
        id_prefix: Of the ids of tool calls.
        reply_format: What is read in the reply; None for what the template's model writes.
    """

    def __init__(
        self,
        template: ChatTemplate,
        *,
        tools: Tools = (),
        prompt: str = "",
        forced: str = "",
        stop_ids: frozenset[int] = frozenset(),
        stop_strings: Sequence[str] = (),
        id_prefix: str = "call",
        reply_format: ReplyFormat | None = None,
    ) -> None:
        form = reply_format or template.reply_format
        self._template = template
        self._stop_ids = stop_ids
        self._stop_strings = tuple(stop_strings)
        self._id_prefix = id_prefix
        self._decoder = ReplyDecoder(template, form.marks(has_tools=bool(tools)), stop_ids)
        self._parser = ReplyParser(form, tools, is_thinking=form.thinking is not None and form.thinking.is_open(prompt))
        self._reply = Reply()
        self._unsent = self._parser.feed(forced)
        self._num_fed = 0
        self._held = ""

    def feed(self, ids: Sequence[int]) -> list[ReplyDelta]:
        """Takes drawn ids and returns what is certain by now."""
        self._num_fed += len(ids)
        self._held += self._decoder.feed(ids)
        size = len(self._held) - self._num_stopping(self._held)
        pieces, self._unsent = self._unsent + self._parser.feed(self._held[:size]), []
        self._held = self._held[size:]
        return self._deltas(pieces)

    def finish(self, ids: Sequence[int], stop_string: str | None = None) -> FinishedReply:
        """The whole reply from all of its ids, of which the first may have been fed; ends the stream."""
        rest = self._held + self._decoder.feed(ids[self._num_fed :]) + self._decoder.finish()
        if stop_string is not None:
            rest = rest.partition(stop_string)[0]
        self._deltas(self._unsent + self._parser.finish(rest))
        spoken = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        is_drifted = self._template.encode(self._decoder.whole(spoken)) != tuple(spoken)
        return FinishedReply(self._reply, is_drifted)

    def _deltas(self, pieces: Iterable[Piece]) -> list[ReplyDelta]:
        deltas: list[ReplyDelta] = []
        last = len(_ORDER)
        for piece in pieces:
            self._reply.add([piece])
            if _ORDER[piece.kind] < last:
                deltas.append(ReplyDelta())
            last = _ORDER[piece.kind]
            deltas[-1] = self._with(deltas[-1], piece)
        return deltas

    def _with(self, delta: ReplyDelta, piece: Piece) -> ReplyDelta:
        """The delta and one piece more."""
        if piece.kind is PieceKind.REASONING:
            return ReplyDelta(delta.reasoning + piece.text)
        if piece.kind is PieceKind.TEXT:
            return ReplyDelta(delta.reasoning, delta.text + piece.text)
        index = len(self._reply.calls) - 1
        calls = delta.tool_calls
        if piece.kind is PieceKind.CALL:
            new = ToolCallDelta(index=index, id=tool_call_id(self._id_prefix, index), name=piece.text)
        elif calls and calls[-1].index == index:
            new = calls[-1].model_copy(update={"arguments": calls[-1].arguments + piece.text})
            calls = calls[:-1]
        else:
            new = ToolCallDelta(index=index, arguments=piece.text)
        return ReplyDelta(delta.reasoning, delta.text, (*calls, new))

    def _num_stopping(self, text: str) -> int:
        """Characters at the end that stand behind a stop string or may begin one."""
        places = [text.index(stop) for stop in self._stop_strings if stop in text]
        return len(text) - min(places) if places else num_doubtful(text, self._stop_strings)
