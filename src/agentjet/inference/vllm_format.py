"""Replies as vLLM's own parsers read them: `vllm:hermes` and its like beside our own formats.

Invariants:

- A reply that streams is read through vLLM's streaming interface, a whole one through the other. Where the two differ
  at the end of a stream, what was given out stands; what only the whole reading has and can still follow is added.
- A parser that raises is asked no more about that reply: what it has not given out is text.
- A mark reaches a parser whole and alone, however the text was cut.

A call can not be forced in a format that only vLLM knows.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agentjet.chat.piece import Piece, PieceKind, Reply, ToolCall
from agentjet.chat.reply_format import NONE, ReplyFormat
from agentjet.chat.source import Machine, Source
from agentjet.chat.tool_format import Tools
from agentjet.inference.vllm_parser import PREFIX, VllmParser, find_parser


def reply_format(tokenizer: Any, *, tool_parser: str, reasoning_parser: str) -> ReplyFormat:
    """The formats that a model's settings name: our own, or vLLM's where the name begins with `vllm:`.

    Raises UserError for a name that is not known and for a parser that does not go with the tokenizer,
    MissingExtraError where vLLM is named and not installed.
    """
    tools, thinking = check_names(tool_parser=tool_parser, reasoning_parser=reasoning_parser)
    form = ReplyFormat.of(
        tokenizer.chat_template or "",
        tool_parser=NONE if tools else tool_parser,
        reasoning_parser=NONE if thinking else reasoning_parser,
    )
    if tools:
        form = replace(form, calls=VllmToolFormat(VllmParser.of(tool_parser, tools, tokenizer)))
    if thinking:
        form = replace(form, thinking=VllmThinking(VllmParser.of(reasoning_parser, thinking, tokenizer)))
    return form


def check_names(*, tool_parser: str, reasoning_parser: str) -> tuple[type[Any] | None, type[Any] | None]:
    """vLLM's classes for the two names; None for a name of our own. Raises as `reply_format`, but for the tokenizer."""
    tools = find_parser("tool_parser", tool_parser) if tool_parser.startswith(PREFIX) else None
    thinking = find_parser("reasoning_parser", reasoning_parser) if reasoning_parser.startswith(PREFIX) else None
    own = {"tool_parser": NONE if tools else tool_parser, "reasoning_parser": NONE if thinking else reasoning_parser}
    ReplyFormat.of("", **own)
    return tools, thinking


class VllmReading:
    """The reading of one reply."""

    def __init__(self, parser: VllmParser, tools: Tools = ()) -> None:
        self.text = ""
        """What was read."""
        self.given = Reply()
        """What was given out."""
        self._parser = parser
        self._tools = tools
        self._live: tuple[Any, Any] | None = None
        self._indices: list[int] = []
        self._has_failed = False

    def feed(self, text: str, *, is_last: bool) -> list[Piece]:
        """Takes the next text and returns what is certain by now."""
        is_whole, self.text = is_last and not self.text, self.text + text
        if is_whole:
            return self._try(self._missing, text)
        pieces = self._try(partial(self._streamed, text, is_last), text)
        return pieces + self._try(self._missing, "") if is_last else pieces

    def _try(self, read: Callable[[], Iterator[Piece]], text: str) -> list[Piece]:
        """What a reading gives; the text when it fails."""
        try:
            pieces = list(() if self._has_failed else read())
        except Exception as error:  # noqa: BLE001 - whatever a parser raises, its reply goes on as text
            self._parser.warn("vLLM's parser raised; the reply goes on as text", error)
            self._has_failed, pieces = True, []
            if self.given == Reply(self.given.content) and self.text.startswith(self.given.content):
                text = self.text[len(self.given.content) :]
        if self._has_failed:
            pieces = [Piece(PieceKind.TEXT, text)]
        self.given.add(pieces)
        return pieces

    def _streamed(self, text: str, is_last: bool) -> Iterator[Piece]:
        self._live = self._live or self._parser.open(self._tools)
        parser, request = self._live
        parts = self._parser.part.findall(text) or [""]
        for number, part in enumerate(parts, 1):
            ids, is_end = self._parser.encode(part), is_last and number == len(parts)
            if (delta := parser.parse_delta(part, ids, request, [], finished=is_end)) is not None:
                yield from self._pieces(delta)

    def _pieces(self, delta: Any) -> Iterator[Piece]:
        """Of one of vLLM's `DeltaMessage`s."""
        yield Piece(PieceKind.REASONING, delta.reasoning or "")
        yield Piece(PieceKind.TEXT, delta.content or "")
        for call in delta.tool_calls:
            if call.function and call.function.name and call.index not in self._indices:
                self._indices.append(call.index)
                yield Piece(PieceKind.CALL, call.function.name)
            if call.function and call.function.arguments and self._indices[-1:] == [call.index]:
                yield Piece(PieceKind.ARGUMENTS, call.function.arguments)

    def _missing(self) -> Iterator[Piece]:
        """What the whole reading has beyond what was given out."""
        parser, request = self._parser.open(self._tools)
        ids = self._parser.encode(self.text)
        reasoning, content, calls = parser.parse(self.text, request, enable_auto_tools=True, model_output_token_ids=ids)
        whole = Reply(content or "", reasoning or "", [ToolCall(one.name, one.arguments) for one in calls or ()])
        pieces = missing(self.given, whole)
        if pieces is None:
            self._parser.warn("vLLM's parser reads a reply otherwise whole than streamed; what was streamed stands")
        yield from pieces or ()


def missing(given: Reply, whole: Reply) -> list[Piece] | None:
    """Pieces that make `whole` of `given`, up to white space and JSON's spelling; None when nothing does."""
    pieces: list[Piece] = []
    for kind, old, new in (
        (PieceKind.REASONING, given.reasoning, whole.reasoning),
        (PieceKind.TEXT, given.content, whole.content),
    ):
        if new.startswith(old):
            pieces += [Piece(kind, new[len(old) :])] if new != old else []
        elif new.strip() != old.strip():
            return None
    if len(given.calls) > len(whole.calls):
        return None
    for index, call in enumerate(whole.calls):
        old = given.calls[index] if index < len(given.calls) else None
        is_newest = index >= len(given.calls) - 1
        if old is None:
            pieces += [Piece(PieceKind.CALL, call.name), Piece(PieceKind.ARGUMENTS, call.arguments)]
        elif old.name == call.name and is_newest and call.arguments.startswith(old.arguments):
            pieces.append(Piece(PieceKind.ARGUMENTS, call.arguments[len(old.arguments) :]))
        elif (old.name, _spelling(old.arguments)) != (call.name, _spelling(call.arguments)):
            return None
    return pieces


def _spelling(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


@dataclass(frozen=True, slots=True)
class VllmToolFormat:
    """Tool calls as one of vLLM's parsers reads them; a `ToolFormat`."""

    parser: VllmParser

    @property
    def marks(self) -> tuple[str, ...]:
        """As `ToolFormat.marks`."""
        return self.parser.marks

    def forced_prefix(self, tool_name: str | None) -> str | None:
        """As `ToolFormat.forced_prefix`: never."""
        return None

    def read(self, source: Source, tools: Tools) -> Machine[None]:
        """As `ToolFormat.read`."""
        reading = VllmReading(self.parser, tools)
        while True:
            text = self.parser.take(source)
            if text or source.is_over:
                yield from reading.feed(text, is_last=source.is_over)
            if source.is_over:
                return
            yield None


@dataclass(frozen=True, slots=True)
class VllmThinking:
    """Thinking as one of vLLM's parsers reads it; a `ThinkingFormat`."""

    parser: VllmParser

    @property
    def marks(self) -> tuple[str, ...]:
        """As `ThinkingFormat.marks`."""
        return self.parser.marks

    def is_open(self, prompt: str) -> bool:
        """As `ThinkingFormat.is_open`: unless the prompt ends with the mark that ends thinking."""
        end = self.parser.open(())[0].reasoning_parser.reasoning_end_str
        return not (end and prompt.rstrip().endswith(end.strip()))

    def forced_prefix(self, prompt: str) -> str | None:
        """As `ThinkingFormat.forced_prefix`: never."""
        return None

    def read(self, source: Source, *, is_open: bool) -> Machine[None]:
        """As `ThinkingFormat.read`; unless `is_open`, the reply does not think."""
        reading = VllmReading(self.parser)
        while is_open:
            text = self.parser.take(source)
            if text or source.is_over:
                pieces = reading.feed(text, is_last=source.is_over)
                yield from (piece for piece in pieces if piece.kind is PieceKind.REASONING)
            content = reading.given.content
            if content.strip() or source.is_over:
                # The parser may hold back what follows the content it gave out.
                start = -1 if source.is_over else reading.text.rfind(content)
                source.text = (content if start < 0 else reading.text[start:]) + source.text
                return
            yield None
