"""The finished calls of one attempt, each with what it adds to its parent, and how requests find them.

Invariants:

- Messages and ids of a call are those of its ancestors and its own, oldest first.
- A call is found by the digest of its whole conversation, the reply included; of two equal ones the later is found.

It does not know templates.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.chat.continuation import RenderedText
from agentjet.chat.conversation import Conversation, Link, Trait
from agentjet.chat.message import Message, digest
from agentjet.schemas.call import Call, ForkCause
from agentjet.schemas.ids import CallId

_MAX_WHOLE_IDS = 4
"""Calls whose ids are kept in one piece."""


@dataclass(slots=True)
class Turn:
    """A finished call."""

    call: CallId
    parent: CallId | None
    added_messages: tuple[Message, ...]
    """Request and reply, without what stands in the parent."""
    num_messages: int
    """Of request and reply, those of the parent included."""
    link: Link
    """The conversation up to the reply."""
    tools: tuple[Any, ...]
    text: RenderedText | None
    """The prompt as rendered then; None while it was not rendered here."""
    opening: str | None
    compared: Trait | None
    depth: int
    """Calls up to this one."""
    added_ids: "array[int]"
    """Prompt and completion, without what stands in the parent."""
    end_id: int | None
    """The end-of-turn token, where it was sampled."""
    is_cut: bool
    """A stop string ended it, so its ids say more than its text."""

    @property
    def reply(self) -> Message:
        """What the model answered."""
        return self.added_messages[-1]


def _without_reasoning(before: Link, reply: Message) -> bytes:
    said = {name: value for name, value in reply.items() if name not in ("reasoning_content", "name")}
    return digest(before.whole, said)


class Turns:
    """The calls."""

    def __init__(self) -> None:
        self._by_id: dict[CallId, Turn] = {}
        self._by_conversation: dict[bytes, Turn] = {}
        self._without_tools: set[bytes] = set()
        self._openings: set[bytes] = set()
        self._agents: set[str] = set()
        self._whole_ids: OrderedDict[CallId, tuple[int, ...]] = OrderedDict()
        self._thought: dict[bytes, Message] = {}
        """Replies with reasoning, by the conversation that ends in them without it."""

    def __contains__(self, call: object) -> bool:
        return call in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def parent(self, call: Call) -> Turn | None:
        """The turn that a call extends; KeyError when it is not known here."""
        return None if call.parent is None else self._by_id[call.parent]

    def add(self, turn: Turn, request: Link, call: Call, whole_ids: tuple[int, ...] | None) -> None:
        """Takes a turn; `request` is its conversation without the reply, `whole_ids` all its ids if at hand."""
        self._by_id[turn.call] = turn
        self._by_conversation[turn.link.whole] = turn
        self._without_tools.add(turn.link.bare)
        self._agents.add(call.agent)
        if call.fork is ForkCause.FIRST:
            self._openings.add(request.whole)
        if "reasoning_content" in turn.reply:
            self._thought[_without_reasoning(request, turn.reply)] = turn.reply
        if whole_ids is not None:
            self._keep_ids(turn, whole_ids)

    def messages(self, turn: Turn) -> list[Message]:
        """Request and reply."""
        return [message for one in self._lineage(turn) for message in one.added_messages]

    def ids(self, turn: Turn) -> tuple[int, ...]:
        """Prompt and completion."""
        whole = self._whole_ids.get(turn.call)
        return whole or tuple(token for one in self._lineage(turn) for token in one.added_ids)

    def restore(self, before: Link, message: Message) -> Message:
        """A message as it was before an agent left the reasoning out, or as it is."""
        if not self._thought or message["role"] != "assistant" or "reasoning_content" in message:
            return message
        reply = self._thought.get(_without_reasoning(before, message))
        return message if reply is None else message | {"reasoning_content": reply["reasoning_content"]}

    def longest(self, links: Sequence[Link]) -> tuple[Turn | None, int]:
        """The turn that a request extends furthest, and the number of messages that stand in it."""
        for size in range(len(links), 0, -1):
            turn = self._by_conversation.get(links[size - 1].whole)
            if turn is not None:
                return turn, size
        return None, 0

    def why_fresh(self, conversation: Conversation) -> ForkCause:
        """Why a request extends none of the turns."""
        links = conversation.links
        if any(link.bare in self._without_tools for link in links):
            return ForkCause.TOOLS_CHANGED
        is_opening = not any(message["role"] == "assistant" for message in conversation.messages)
        if is_opening or conversation.agent not in self._agents or links[-1].whole in self._openings:
            return ForkCause.FIRST
        return ForkCause.HISTORY_EDITED

    def _lineage(self, turn: Turn) -> list[Turn]:
        """The call, its parent and so on, oldest first."""
        lineage = [turn]
        while (parent := lineage[-1].parent) is not None:
            lineage.append(self._by_id[parent])
        return lineage[::-1]

    def _keep_ids(self, turn: Turn, ids: tuple[int, ...]) -> None:
        if turn.parent is not None:
            self._whole_ids.pop(turn.parent, None)
        self._whole_ids[turn.call] = ids
        while len(self._whole_ids) > _MAX_WHOLE_IDS:
            self._whole_ids.popitem(last=False)
