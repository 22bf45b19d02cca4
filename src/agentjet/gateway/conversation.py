"""Conversations that the gateway keeps, so that an agent may name a response in place of sending its history again.

Invariants:

- A conversation is seen by the key that had it only, and is gone once the key is forgotten.
- Together they hold at most `max_chars` characters; those that were not used for longest go first. What is gone, or was
  before the gateway started, is a clear error, never a shorter history.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agentjet.chat.message import Message
from agentjet.gateway.fault import ApiError
from agentjet.gateway.request import ModelRequest
from agentjet.schemas.call import InferReply

RESPONSE_PREFIX = "resp_"
"""Before a call's id: the id of its response."""
MAX_CHARS = 256 * 1024 * 1024
_CHARS_PER_MESSAGE = 256
"""What a message costs besides its text."""

R = TypeVar("R", bound=ModelRequest)


@dataclass(frozen=True, slots=True)
class _Conversation:
    key: str
    messages: tuple[Message, ...]
    num_chars: int


class Conversations:
    """By response, of all keys."""

    def __init__(self, *, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._kept: OrderedDict[str, _Conversation] = OrderedDict()
        self._of_key: defaultdict[str, set[str]] = defaultdict(set)

    def continued(self, key: str, request: R) -> R:
        """The request with the conversation that it names before its own messages, behind its instructions.

        Raises ApiError (400) when there is none.
        """
        if not request.previous:
            return request
        found = self._kept.get(request.previous)
        if found is None or found.key != key:
            why = (
                f"no response {request.previous!r} is kept for this key: it was not stored, is too old, or the gateway "
                "was started again since; send the items of the conversation"
            )
            raise ApiError(400, "previous_response_not_found", why, param="previous_response_id")
        self._kept.move_to_end(request.previous)
        opening, rest = request.messages[: request.num_instructions], request.messages[request.num_instructions :]
        return replace(request, messages=(*opening, *found.messages, *rest))

    def add(self, key: str, request: ModelRequest, reply: InferReply) -> None:
        """Keep what a request and its reply have said, if the request wants that; repeating it changes nothing."""
        name = RESPONSE_PREFIX + reply.call
        if not request.is_remembered or name in self._kept:
            return
        messages = (*request.messages[request.num_instructions :], reply.message)
        self._kept[name] = kept = _Conversation(key, messages, _num_chars(messages))
        self._of_key[key].add(name)
        self._num_chars += kept.num_chars
        while self._num_chars > self._max_chars:
            self._drop(next(iter(self._kept)))

    def forget(self, key: str) -> None:
        """The key's episode is over."""
        for name in tuple(self._of_key.get(key, ())):
            self._drop(name)

    def _drop(self, name: str) -> None:
        gone = self._kept.pop(name)
        self._num_chars -= gone.num_chars
        names = self._of_key[gone.key]
        names.discard(name)
        if not names:
            del self._of_key[gone.key]


def _num_chars(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(_num_chars_of(message) for message in messages)


def _num_chars_of(message: Mapping[str, Any]) -> int:
    texts = [message.get("content"), message.get("reasoning_content")]
    texts += [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return _CHARS_PER_MESSAGE + sum(len(text) for text in texts if text)
