"""Pieces of a reply as they become certain, and the reply that they make.

Invariant: a reply is its pieces, joined; there is no other way to make one. So what streams and what is stored agree.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class PieceKind(StrEnum):
    """What a piece adds to."""

    REASONING = "reasoning"
    """The thinking."""
    TEXT = "text"
    """The content."""
    CALL = "call"
    """A new tool call; its text is the tool's name."""
    ARGUMENTS = "arguments"
    """The arguments of the newest call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a reply."""

    kind: PieceKind
    text: str


@dataclass(slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str = ""
    """As the model wrote them: JSON, unless the model broke it."""


@dataclass(slots=True)
class Reply:
    """What a model said."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def add(self, pieces: Iterable[Piece]) -> None:
        """Takes the next pieces."""
        for piece in pieces:
            match piece.kind:
                case PieceKind.REASONING:
                    self.reasoning += piece.text
                case PieceKind.TEXT:
                    self.content += piece.text
                case PieceKind.CALL:
                    self.calls.append(ToolCall(piece.text))
                case PieceKind.ARGUMENTS:
                    self.calls[-1].arguments += piece.text

    def message(self, *, id_prefix: str) -> dict[str, Any]:
        """The OpenAI assistant message, thinking in `reasoning_content`; calls are numbered behind `id_prefix`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": tool_call_id(id_prefix, index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for index, call in enumerate(self.calls)
            ]
        return message


def tool_call_id(prefix: str, index: int) -> str:
    """Id of a reply's call, unique where the prefix is."""
    return f"{prefix}_{index}"
