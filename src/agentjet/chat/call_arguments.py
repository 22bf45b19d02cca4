"""The arguments of a tool call, read from where they begin.

A closing mark ends arguments that are broken. Inside a JSON string it is text, unless what follows shows that the
string was never closed: a line break or another mark, which no JSON string holds, or the end of the reply.
"""

from collections.abc import Sequence

from agentjet.chat.nesting import Nesting
from agentjet.chat.piece import Piece, PieceKind
from agentjet.chat.source import Machine, Source, first_mark, num_doubtful, skip_white

_AFTER_OPEN_STRING = ("", "\n", "<")


def json_arguments(source: Source, closings: Sequence[str], *, depth: int = 0) -> Machine[None]:
    """A JSON object as it stands in the source, `depth` brackets deep; reads on to its end or before a closing mark."""
    nesting, num_read = Nesting(depth), 0
    while True:
        text = source.text
        close = first_mark(text, closings)
        size = close[0] if close else certain_size(source, closings)
        end = nesting.read(text[num_read:size], depth)
        if end is not None:
            yield Piece(PieceKind.ARGUMENTS, source.take(num_read + end))
            return
        is_closed = close is not None
        if close is not None and nesting.is_in_string:
            after = text[size + len(close[1]) :][:1]
            is_closed = after in _AFTER_OPEN_STRING
            if after and not is_closed:
                nesting.read(close[1], depth)
                yield Piece(PieceKind.ARGUMENTS, source.take(size + len(close[1])))
                num_read = 0
                continue
            is_closed = is_closed and (bool(after) or source.is_over)
        # White space at the end of broken arguments belongs to the mark.
        given = source.take(len(text[:size].rstrip()))
        num_read = size - len(given)
        if given:
            yield Piece(PieceKind.ARGUMENTS, given)
        if is_closed or source.is_over:
            return
        yield None


def rest_of_object(source: Source, closings: Sequence[str]) -> Machine[None]:
    """Drops what follows the arguments in the object that holds them: its end, or more members and its end."""
    yield from skip_white(source)
    if source.text.startswith("}"):
        source.take(1)
        return
    if not source.text.startswith(","):
        return
    nesting = Nesting(1)
    while True:
        close = first_mark(source.text, closings)
        size = close[0] if close else certain_size(source, closings)
        end = nesting.read(source.text[:size], 0)
        source.take(size if end is None else end)
        if end is not None or close is not None or source.is_over:
            return
        yield None


def certain_size(source: Source, marks: Sequence[str]) -> int:
    """Characters of a source without a mark that can not be the beginning of one."""
    return len(source.text) - (0 if source.is_over else num_doubtful(source.text, marks))
