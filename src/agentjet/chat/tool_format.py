"""How a family of models writes tool calls, and the machine that reads them.

A call is an opening mark, a head that names the tool, arguments, and what closes it. Invariants:

- What has been given out is never taken back. A name is given out as soon as its head is whole and arguments begin;
  from then on there is a call, and its arguments are given out as they are drawn, verbatim.
- If the JSON breaks after that, the arguments are what was drawn up to the closing mark or the end of the reply.
- If the head breaks before that, all of it is text, mark and white space included, and reading goes on behind the mark.
- No text is given out that may later turn out to belong to a call, nor white space that stands before one.
- What is written between the arguments of a call and its closing mark belongs to the call and is dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentjet.chat.call_arguments import certain_size
from agentjet.chat.call_head import Head
from agentjet.chat.nesting import Nesting
from agentjet.chat.piece import Piece, PieceKind
from agentjet.chat.source import Machine, Source, first_mark

Tools = Sequence[Mapping[str, Any]]
"""OpenAI function tools."""


class ToolFormat(Protocol):
    """A family's way to write tool calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must survive the decoding of ids, should they be special tokens."""
        ...

    def read(self, source: Source, tools: Tools) -> Machine[None]:
        """Text and calls up to the end of the source."""
        ...

    def forced_prefix(self, tool_name: str | None) -> str | None:
        """How a reply begins that has to be a call, of the named tool or of any; None if that can not be forced."""
        ...


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """A format that is told by its marks."""

    openings: tuple[str, ...]
    heads: tuple[Head, ...]
    closings: tuple[str, ...] = ()
    """Each ends a call that is broken."""
    glue: tuple[str, ...] = ()
    """Stands after calls and is dropped."""
    inner: tuple[str, ...] = ()
    """Marks that heads look for."""
    begins_bare: bool = False
    """A call without an opening mark may begin the reply."""
    follows_bare: bool = False
    """A call without an opening mark may follow another call."""
    forced: str = ""
    """The beginning of a call up to the tool's name."""
    forced_end: str = ""
    """What follows the name, up to the arguments."""

    @property
    def marks(self) -> tuple[str, ...]:
        """As `ToolFormat.marks`."""
        return (*self.openings, *self.closings, *self.glue, *self.inner)

    def forced_prefix(self, tool_name: str | None) -> str | None:
        """As `ToolFormat.forced_prefix`."""
        return self.forced + (f"{tool_name}{self.forced_end}" if tool_name else "")

    def read(self, source: Source, tools: Tools) -> Machine[None]:
        """As `ToolFormat.read`."""
        is_bare, has_calls = self.begins_bare, False
        while (start := (yield from self._opening(source, is_bare=is_bare))) is not None:
            if (yield from self._call(source, start, tools)):
                yield from self._skip_glue(source)
                is_bare, has_calls = self.follows_bare, True
            else:
                yield Piece(PieceKind.TEXT, source.take(start))
                is_bare = False
        rest = source.take(len(source.text))
        if rest.strip() or not has_calls:
            yield Piece(PieceKind.TEXT, rest)

    def _opening(self, source: Source, *, is_bare: bool) -> Machine[int | None]:
        """Gives out the text before a call's opening and the white space there; where its head begins in the source.

        None at the end of the source.
        """
        while is_bare:
            start = len(source.text) - len(source.text.lstrip())
            if source.text[start:].startswith("{"):
                return start
            if source.text[start:] or source.is_over:
                break
            yield None
        while True:
            found = first_mark(source.text, self.openings)
            if found is None and source.is_over:
                return None
            size = found[0] if found else certain_size(source, self.openings)
            text = source.take(len(source.text[:size].rstrip()))
            if text:
                yield Piece(PieceKind.TEXT, text)
            if found is not None:
                return size - len(text) + len(found[1])
            yield None

    def _call(self, source: Source, start: int, tools: Tools) -> Machine[bool]:
        """Gives out a call whose head begins at `start`; False, and nothing read, if there is none."""
        nesting, num_read, end = Nesting(), start, None
        while True:
            close = first_mark(source.text, self.closings, start)
            size = close[0] if close else max(start, certain_size(source, self.closings))
            body = source.text[start:size]
            for head in self.heads:
                if (found := head.match(body)) is not None:
                    name, num_characters = found
                    source.take(start + num_characters)
                    yield Piece(PieceKind.CALL, name)
                    yield from head.arguments(source, self.closings, _tool(tools, name))
                    return True
            num_read = max(num_read, start + body.find("{"))
            if "{" in body and end is None:
                end = nesting.read(source.text[num_read:size], 0)
                end, num_read = None if end is None else num_read + end, size
            if end is not None:
                return (yield from self._whole(source, start, end))
            if close or source.is_over or not any(head.is_viable(body) for head in self.heads):
                return False
            yield None

    def _whole(self, source: Source, start: int, end: int) -> Machine[bool]:
        """Gives out a call that is all there, though not in the usual order."""
        body = source.text[start:end]
        call = next((call for head in self.heads if (call := head.whole(body)) is not None), None)
        if call is None:
            return False
        source.take(end)
        yield Piece(PieceKind.CALL, call.name)
        yield Piece(PieceKind.ARGUMENTS, call.arguments)
        return True

    def _skip_glue(self, source: Source) -> Machine[None]:
        """Drops what parts calls, and the white space before it."""
        while True:
            text = source.text.lstrip()
            may_open = not source.is_over and any(mark.startswith(text) for mark in self.openings)
            mark = next((mark for mark in self.glue if text.startswith(mark)), None)
            if text.startswith(self.openings):
                return
            if mark is not None and not may_open:
                source.text = text[len(mark) :]
            elif may_open or (not source.is_over and any(mark.startswith(text) for mark in self.glue)):
                yield None
            else:
                return


def _tool(tools: Tools, name: str) -> Mapping[str, Any]:
    """The definition of a tool; empty if the model made it up."""
    functions = (tool.get("function", {}) for tool in tools)
    return next((function for function in functions if function.get("name") == name), {})
