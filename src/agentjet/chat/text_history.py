"""Token-exact histories of plain prompts, which no template renders.

Invariants:

- A prompt that begins with an earlier call's prompt and all the text of its tokens goes on from those exact ids; only
  what follows is encoded. Text of special tokens and of a stop string counts: agents write them out.
- A prompt that shows an earlier reply without its end token keeps the other ids, but has no parent.
- Anything else is encoded whole, behind what the tokenizer puts before a text of its own accord (BOS), once.

Of texts it keeps digests, and of ids what each call adds to its parent. It does not know messages, or where calls are
stored.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

from agentjet.chat.template import ChatTemplate
from agentjet.schemas.call import Call, FinishReason, ForkCause
from agentjet.schemas.ids import CallId


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """What a call starts from."""

    parent: CallId | None
    """Call whose prompt and completion come first."""
    ids: tuple[int, ...]
    """The whole prompt."""
    increment: tuple[int, ...]
    """The ids after the parent's; the whole prompt when there is no parent."""
    fork: ForkCause
    text: str
    """What stands behind the parent's text; the whole prompt when there is no parent."""
    misses_reply: bool
    """It continues no known call."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text as its size and running digest."""

    size: int
    state: Any

    def then(self, text: str) -> "_Text":
        state = self.state.copy()
        state.update(text.encode("utf-8", "surrogatepass"))
        return _Text(self.size + len(text), state)


@dataclass(frozen=True, slots=True)
class _Turn:
    call: CallId
    parent: "_Turn | None"
    added_ids: tuple[int, ...]
    """Prompt and completion, without what stands in the parent."""
    whole: _Text
    """Prompt and all that was sampled, written out."""
    fork: ForkCause
    """Of a prompt that shows only what the agent was given of the reply."""
    num_hidden: int
    """Ids at the end that such a prompt does not show."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion."""
        lineage: list[_Turn] = [self]
        while (parent := lineage[-1].parent) is not None:
            lineage.append(parent)
        return tuple(token for turn in reversed(lineage) for token in turn.added_ids)


class TextHistory:
    """The finished calls of one attempt that were asked by plain prompts."""

    def __init__(self, template: ChatTemplate, stop_ids: frozenset[int]) -> None:
        self._template = template
        self._stop_ids = stop_ids
        self._turns: dict[CallId, _Turn] = {}
        self._by_text: dict[tuple[int, bytes], tuple[_Turn, bool]] = {}
        """Turns by the digest of a text that continues them, and whether that is the whole text."""
        self._sizes: set[int] = set()

    def __contains__(self, call: CallId) -> bool:
        return call in self._turns

    def __len__(self) -> int:
        return len(self._turns)

    def prompt(self, text: str, *, agent: str = "") -> TextPrompt:
        """The prompt of a new request."""
        found, size = self._longest(text, agent)
        if found is None:
            ids = self._encode_opening(text)
            return TextPrompt(None, ids, ids, ForkCause.FIRST, text, misses_reply=True)
        turn, is_whole = found
        if is_whole:
            added = self._template.encode_behind(text[:size], text[size:])
            return TextPrompt(turn.call, turn.ids + added, added, ForkCause.NONE, text[size:], misses_reply=False)
        if turn.fork is ForkCause.STOP_STRING:
            ids = self._encode_opening(text)
        else:
            shown = turn.ids[: len(turn.ids) - turn.num_hidden]
            ids = shown + self._template.encode_behind(text[:size], text[size:])
        return TextPrompt(None, ids, ids, turn.fork, text, misses_reply=False)

    def add(self, call: Call) -> None:
        """Takes a finished call.

        A parent has to be added before its children; KeyError otherwise.
        """
        if call.call in self._turns:
            return
        parent = self._turns[call.parent] if call.parent is not None else None
        asked = (parent.whole if parent else _opening(call.agent)).then(call.prompt or "")
        has_ended = bool(call.completion_ids) and call.completion_ids[-1] in self._stop_ids
        is_cut = call.finish_reason is FinishReason.STOP and not has_ended
        turn = _Turn(
            call=call.call,
            parent=parent,
            added_ids=call.prompt_ids + call.completion_ids,
            whole=asked.then(self._template.decode(call.completion_ids, with_specials=True)),
            fork=ForkCause.STOP_STRING if is_cut else ForkCause.END_TOKEN,
            num_hidden=int(has_ended),
        )
        self._turns[turn.call] = turn
        shown = asked.then(call.message.get("content") or "")
        self._keep(shown, turn, is_whole=False)
        self._keep(turn.whole, turn, is_whole=True)

    def _keep(self, text: _Text, turn: _Turn, *, is_whole: bool) -> None:
        self._sizes.add(text.size)
        self._by_text[text.size, text.state.digest()] = turn, is_whole

    def _longest(self, text: str, agent: str) -> tuple[tuple[_Turn, bool] | None, int]:
        best: tuple[_Turn, bool] | None = None
        best_size, read = 0, _opening(agent)
        for size in sorted(size for size in self._sizes if size <= len(text)):
            read = read.then(text[read.size : size])
            found = self._by_text.get((size, read.state.digest()))
            if found is not None:
                best, best_size = found, size
        return best, best_size

    def _encode_opening(self, text: str) -> tuple[int, ...]:
        before = self._template.opening_ids
        is_there = bool(before) and text.startswith(self._template.decode(before, with_specials=True))
        return (() if is_there else before) + self._template.encode(text)


def _opening(agent: str) -> _Text:
    """Before the first character."""
    name = hashlib.blake2b(agent.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return _Text(0, hashlib.blake2b(digest_size=16, key=name))
