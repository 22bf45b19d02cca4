"""Text that arrives in pieces, for machines that read it.

A machine is a generator: it yields what has become certain, and None where it needs more text. Whether it asks for
more may depend on the pieces; what it yields, joined, must not. Once the source is over it asks no more.
"""

from collections.abc import Generator, Sequence
from typing import TypeVar

from agentjet.chat.piece import Piece

R = TypeVar("R")
Machine = Generator[Piece | None, None, R]
"""Yields pieces and None ("more text, please"); returns `R` to the machine that called it."""


class Source:
    """What has been drawn and not yet been read."""

    def __init__(self) -> None:
        self.text = ""
        self.is_over = False
        """No more text will come."""

    def take(self, num_characters: int) -> str:
        """Reads on."""
        taken, self.text = self.text[:num_characters], self.text[num_characters:]
        return taken


def first_mark(text: str, marks: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Position of the mark that comes first, and the mark; the longest one of those at one position."""
    found = [(text.find(mark, start), -len(mark), mark) for mark in marks]
    at = min((one for one in found if one[0] >= 0), default=None)
    return None if at is None else (at[0], at[2])


def num_doubtful(text: str, marks: Sequence[str]) -> int:
    """Characters at the end that one of the marks may begin with."""
    longest = max(map(len, marks), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        end = text[-size:]
        if any(mark.startswith(end) for mark in marks if len(mark) > size):
            return size
    return 0


def skip_white(source: Source) -> Machine[None]:
    """The source from its next character on that is no white space."""
    while True:
        source.text = source.text.lstrip()
        if source.text or source.is_over:
            return
        yield None
