"""Thinking apart from the answer: `<think>` ... `</think>` at the beginning of a reply.

Invariants:

- A reply thinks if its prompt ends inside an open mark, or if it begins with the opening mark. Other marks are text.
- A reply that ends before the closing mark is all thinking.
- White space around the thinking, and between it and the answer, belongs to the marks.
"""

from dataclasses import dataclass
from typing import Protocol

from agentjet.chat.piece import Piece, PieceKind
from agentjet.chat.source import Machine, Source, num_doubtful, skip_white


class ThinkingFormat(Protocol):
    """A way to set thinking apart."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that must survive the decoding of ids, should they be special tokens."""
        ...

    def is_open(self, prompt: str) -> bool:
        """Whether a reply to a prompt may begin inside its thinking."""
        ...

    def forced_prefix(self, prompt: str) -> str | None:
        """How a reply to a prompt begins that is not to think; None if that can not be forced."""
        ...

    def read(self, source: Source, *, is_open: bool) -> Machine[None]:
        """The thinking, and the source after it."""
        ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks of a model that thinks."""

    opening: str = "<think>"
    closing: str = "</think>"

    @property
    def marks(self) -> tuple[str, ...]:
        """As `ThinkingFormat.marks`."""
        return (self.opening, self.closing)

    def is_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside an open mark."""
        return prompt.rstrip().endswith(self.opening)

    def forced_prefix(self, prompt: str) -> str | None:
        """As `ThinkingFormat.forced_prefix`."""
        return f"\n{self.closing}\n\n" if self.is_open(prompt) else ""

    def read(self, source: Source, *, is_open: bool) -> Machine[None]:
        """As `ThinkingFormat.read`."""
        if not (yield from self._opens(source)) and not is_open:
            return
        yield from skip_white(source)
        while True:
            before, mark, _ = source.text.partition(self.closing)
            if not mark and not source.is_over:
                before = before[: len(before) - num_doubtful(before, (self.closing,))]
            text = source.take(len(before.rstrip()))
            if text:
                yield Piece(PieceKind.REASONING, text)
            if mark:
                source.take(source.text.index(mark) + len(mark))
                yield from skip_white(source)
                return
            if source.is_over:
                source.text = ""
                return
            yield None

    def _opens(self, source: Source) -> Machine[bool]:
        """Reads the opening mark, where it is there."""
        while True:
            start = source.text.lstrip()
            if start.startswith(self.opening):
                source.text = start[len(self.opening) :]
                return True
            if source.is_over or not self.opening.startswith(start):
                return False
            yield None


THINKING = {"think": Thinking(), "mistral": Thinking("[THINK]", "[/THINK]")}
"""By the name of the setting `reasoning_parser`."""


def detect_thinking(chat_template: str) -> str | None:
    """Name of the marks that a chat template knows; None when it knows none."""
    return next((name for name, one in THINKING.items() if one.closing in chat_template), None)
