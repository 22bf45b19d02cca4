"""Token-exact histories: the prompt of a request continues an earlier call's ids, or is rendered afresh with a cause.

Invariants:

- A request whose messages are an earlier call's messages plus its reply, and then more, keeps that call's ids (prompt
  and sampled) exactly; only the text that the template adds is encoded.
- That happens only if the template's rendering of the whole request continues the earlier prompt and shows the reply
  (up to white space and the spelling of tool calls). Otherwise the request is rendered whole, and the cause is named.
- What the template adds is prompt: also an end-of-turn token that a truncated reply lacks.
- Agent name, tools, roles, texts and tool calls all take part in the comparison.

One history holds the calls of one attempt for one model. Its memory grows with the number of messages and tokens, for a
call keeps only what it adds to its parent; so does encoding. It does not know where calls are stored.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.chat.message import Message, digest, normalise, normalise_all
from agentjet.chat.parser import ToolCall, parse_reply
from agentjet.chat.template import ChatTemplate
from agentjet.schemas.call import Call, FinishReason, ForkCause
from agentjet.schemas.ids import CallId

_ROOT = b"agentjet"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a call starts from."""

    parent: CallId | None
    """Call whose prompt and completion come first."""
    ids: tuple[int, ...]
    """The whole prompt."""
    increment: tuple[int, ...]
    """The ids after the parent's; the whole prompt when there is no parent."""
    fork: ForkCause
    num_messages_before: int
    """Messages of the request that stand in the parent and its reply."""
    text: str
    """The rendering of the whole request."""
    messages: tuple[Message, ...]
    """The whole request in canonical form."""
    misses_reply: bool
    """The messages after the parent's hold a reply that no known call gave."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A finished call."""

    call: CallId
    parent: CallId | None
    added_messages: tuple[Message, ...]
    """Request and reply, without what stands in the parent."""
    num_messages: int
    """Of request and reply, those of the parent included."""
    tools: tuple[Any, ...]
    text_size: int
    """Characters of the prompt as rendered then."""
    text_digest: bytes
    """Of that text, which later prompts have to begin with."""
    added_ids: "array[int]"
    """Prompt and completion, without what stands in the parent."""
    end_id: int | None
    """The end-of-turn token, where it was sampled."""
    is_cut: bool
    """A stop string ended it, so its ids say more than its text."""
    fork: ForkCause

    @property
    def reply(self) -> Message:
        """What the model answered."""
        return self.added_messages[-1]

    def begins(self, text: str) -> bool:
        """Whether a text begins with the prompt as rendered then."""
        return len(text) >= self.text_size and _text_digest(text[: self.text_size]) == self.text_digest


class History:
    """The finished calls of one attempt."""

    def __init__(self, template: ChatTemplate, stop_ids: frozenset[int]) -> None:
        self._template = template
        self._stop_ids = stop_ids
        self._turns: dict[CallId, _Turn] = {}
        self._by_conversation: dict[bytes, _Turn] = {}
        self._without_tools: set[bytes] = set()
        self._openings: set[bytes] = set()
        self._agents: set[str] = set()

    def __contains__(self, call: CallId) -> bool:
        return call in self._turns

    def __len__(self) -> int:
        return len(self._turns)

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] = (), agent: str = "") -> Prompt:
        """The prompt of a new request.

        Raises BadRequestError for messages that are no text chat, or that the template refuses.
        """
        canonical = normalise_all(messages)
        text = self._template.render(canonical, tools)
        links = _chain(canonical, tools, agent)
        turn, size = self._longest(links)
        misses_reply = any(message["role"] == "assistant" for message in canonical[size:])
        added = None
        if turn is None:
            fork = self._why_fresh(canonical, links, agent)
        elif turn.is_cut:
            fork = ForkCause.STOP_STRING
        else:
            added = self._added_text(turn, canonical, text)
            fork = ForkCause.TEMPLATE_REWROTE if added is None else ForkCause.NONE
        if turn is None or added is None:
            ids = self._template.encode(text)
            return Prompt(None, ids, ids, fork, 0, text, canonical, misses_reply)
        increment = self._encode_added(turn, added)
        return Prompt(turn.call, self._ids(turn) + increment, increment, fork, size, text, canonical, misses_reply)

    def add(self, call: Call, *, prompt: Prompt | None = None) -> None:
        """Takes a finished call; `prompt` is what it started from, where that is at hand.

        A parent has to be added before its children; KeyError otherwise.
        """
        if call.call in self._turns:
            return
        before = self._messages(self._turns[call.parent]) if call.parent is not None else ()
        messages = prompt.messages if prompt else before + normalise_all(call.messages)
        text = prompt.text if prompt else self._template.render(messages, call.tools)
        whole = (*messages, normalise(call.message, "message"))
        last = call.completion_ids[-1] if call.completion_ids else None
        has_ended = call.finish_reason in (FinishReason.STOP, FinishReason.TOOL_CALLS)
        turn = _Turn(
            call=call.call,
            parent=call.parent,
            added_messages=whole[len(before) :],
            num_messages=len(whole),
            tools=call.tools,
            text_size=len(text),
            text_digest=_text_digest(text),
            added_ids=array("i", call.prompt_ids + call.completion_ids),
            end_id=last if last in self._stop_ids else None,
            is_cut=has_ended and last not in self._stop_ids,
            fork=call.fork,
        )
        self._turns[turn.call] = turn
        self._index(turn, _chain(whole, call.tools, call.agent), call.agent)

    def _lineage(self, turn: _Turn) -> list[_Turn]:
        """The call, its parent and so on, oldest first."""
        lineage = [turn]
        while (parent := lineage[-1].parent) is not None:
            lineage.append(self._turns[parent])
        return lineage[::-1]

    def _messages(self, turn: _Turn) -> tuple[Message, ...]:
        return tuple(message for one in self._lineage(turn) for message in one.added_messages)

    def _ids(self, turn: _Turn) -> tuple[int, ...]:
        return tuple(token for one in self._lineage(turn) for token in one.added_ids)

    def _index(self, turn: _Turn, links: list[tuple[bytes, bytes]], agent: str) -> None:
        whole, bare = links[-1]
        self._by_conversation[whole] = turn
        self._without_tools.add(bare)
        self._agents.add(agent)
        if turn.fork is ForkCause.FIRST and len(links) > 1:
            self._openings.add(links[-2][0])

    def _longest(self, links: list[tuple[bytes, bytes]]) -> tuple[_Turn | None, int]:
        for size in range(len(links), 0, -1):
            turn = self._by_conversation.get(links[size - 1][0])
            if turn is not None:
                return turn, size
        return None, 0

    def _why_fresh(self, messages: Sequence[Message], links: list[tuple[bytes, bytes]], agent: str) -> ForkCause:
        if any(bare in self._without_tools for _, bare in links):
            return ForkCause.TOOLS_CHANGED
        is_opening = not any(message["role"] == "assistant" for message in messages)
        if is_opening or agent not in self._agents or links[-1][0] in self._openings:
            return ForkCause.FIRST
        return ForkCause.HISTORY_EDITED

    def _added_text(self, turn: _Turn, messages: tuple[Message, ...], text: str) -> str | None:
        """What the whole rendering adds after the reply's last character; None when it does not continue the turn."""
        end = self._template.reply_end
        if end is None or not turn.begins(text):
            return None
        reply, start = turn.reply, turn.text_size
        plain = reply["content"] + end
        if "tool_calls" not in reply and text.startswith(plain, start):
            return text[start + len(plain) - len(end) :]
        # The reply reads otherwise in the template than as sampled: see whether only its spelling differs.
        earlier = self._template.render(messages[: turn.num_messages], turn.tools, opens_reply=False)
        if not (turn.begins(earlier) and earlier.endswith(end) and text.startswith(earlier)):
            return None
        shown = earlier[start : len(earlier) - len(end)]
        return text[len(earlier) - len(end) :] if _shows(shown, reply) else None

    def _encode_added(self, turn: _Turn, added: str) -> tuple[int, ...]:
        """Ids of the added text, without the end-of-turn token where that was sampled."""
        ids = self._template.encode(added)
        if turn.end_id is None:
            return ids
        end_text = self._template.decode([turn.end_id], with_specials=True)
        if not added.startswith(end_text):
            return ids  # it ended with another token than the template's
        return ids[1:] if ids[:1] == (turn.end_id,) else self._template.encode(added[len(end_text) :])


def _text_digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _chain(messages: Sequence[Message], tools: Sequence[Any], agent: str) -> list[tuple[bytes, bytes]]:
    """For each length from 1 on: the digest of that many messages with the tools, and without them."""
    whole, bare = digest(_ROOT, [agent, list(tools)]), digest(_ROOT, [agent])
    links = []
    for message in messages:
        whole, bare = digest(whole, message), digest(bare, message)
        links.append((whole, bare))
    return links


def _shows(shown: str, reply: Message) -> bool:
    """Whether rendered text says what the reply says."""
    content, calls = parse_reply(shown, has_tools="tool_calls" in reply)
    wanted = [call["function"] for call in reply.get("tool_calls", ())]
    return content.strip() == reply["content"].strip() and [_function(call) for call in calls] == wanted


def _function(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return normalise({"role": "assistant", "tool_calls": [{"function": function}]})["tool_calls"][0]["function"]
