"""Requests in canonical form with their chain digests; what an earlier request began with is not worked on again.

Invariants:

- A conversation read with the help of earlier ones equals the one read alone, whatever the spelling of its messages.
- Two requests are taken for equal up to a message only if their JSON is: `1`, `1.0` and `true` differ.
- Messages are copied once: a caller that changes its own later changes nothing here.

The work per request grows with what it adds, but for one comparison of its messages with those of an earlier request.
It does not know calls, templates or tokens.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any

import orjson

from agentjet.chat.message import Message, digest, normalise
from agentjet.errors import BadRequestError

_ROOT = b"agentjet"
_MAX_SEEN = 8
"""Requests that are kept for comparison; agents that take turns in one attempt are rarely more."""
_USUAL_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content"})
_THINKING_MARKS = ("think>", "[THINK]")


class Trait(Flag):
    """What templates may treat in a way of its own."""

    SYSTEM = auto()
    """System messages at the start."""
    CALLS = auto()
    """Tool calls or their results."""
    THINKING = auto()
    """Reasoning, in a field or marked in a text."""
    UNUSUAL = auto()
    """A field that is none of the usual ones, or a system message in the middle."""


@dataclass(frozen=True, slots=True)
class Link:
    """A conversation up to one of its messages."""

    whole: bytes
    """Digest of the messages, the tools and the agent's name."""
    bare: bytes
    """Digest of the messages and the agent's name."""
    traits: Trait
    """Of all the messages."""
    is_system: bool
    """There are only system messages yet."""

    def then(self, message: Message) -> "Link":
        """The conversation with one message more; TypeError for what is no JSON."""
        is_system = self.is_system and message["role"] == "system"
        traits = self.traits | _traits(message, is_system)
        told = _without_label(message)
        return Link(digest(self.whole, told), digest(self.bare, told), traits, is_system)


def root(tools: Sequence[Any], agent: str) -> Link:
    """Before the first message; BadRequestError for tools that are no JSON."""
    try:
        whole = digest(_ROOT, [agent, list(tools)])
    except TypeError as error:
        raise BadRequestError(f"tools: they can not be written as JSON: {error}") from error
    return Link(whole, digest(_ROOT, [agent]), Trait(0), True)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request."""

    messages: tuple[Message, ...]
    """In canonical form; at least one."""
    links: tuple[Link, ...]
    """One for each message."""
    tools: tuple[Any, ...]
    agent: str

    @property
    def traits(self) -> Trait:
        """Of all the messages."""
        return self.links[-1].traits

    @property
    def num_system(self) -> int:
        """Messages before the first that is no system message."""
        return next((i for i, message in enumerate(self.messages) if message["role"] != "system"), len(self.messages))


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """A request as it was spelt, and read."""

    spelt: list[Mapping[str, Any]]
    numbers: tuple[tuple[int, bytes], ...]
    """Messages that hold numbers or booleans, which Python takes for equal too easily: their index and JSON."""
    root: bytes
    read: Conversation

    def num_equal(self, messages: list[Mapping[str, Any]]) -> int:
        """Messages from the first on that are spelt the same."""
        size = min(len(self.spelt), len(messages))
        if self.spelt[:size] != messages[:size]:
            size = next(i for i in range(size) if self.spelt[i] != messages[i])
        return next(
            (i for i, body in self.numbers if i < size and orjson.dumps(messages[i], default=str) != body), size
        )


def _as_sent(before: Link, message: Message) -> Message:
    return message


class ConversationReader:
    """Reads the requests of one attempt.

    `restore` is given each message and the conversation before it, and says what it was before the agent left something
    out of it.
    """

    def __init__(self, restore: Callable[[Link, Message], Message] = _as_sent) -> None:
        self._restore = restore
        self._seen: list[_Seen] = []

    def read(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], agent: str) -> Conversation:
        """A request in canonical form.

        Raises BadRequestError, which names the message, for what is no text chat.
        """
        given = list(messages)
        if not given:
            raise BadRequestError("messages: there has to be at least one")
        link = start = root(tools, agent)
        known, size = self._closest(given, start.whole)
        canonical = list(known.read.messages[:size]) if known else []
        links = list(known.read.links[:size]) if known else []
        numbers = [one for one in known.numbers if one[0] < size] if known else []
        spelt = known.spelt[:size] if known else []
        link = links[-1] if links else start
        for index, message in enumerate(given[size:], size):
            own = copy.deepcopy(message)
            one = normalise(own, f"messages[{index}]")
            try:
                canonical.append(self._restore(link, one))
                link = link.then(canonical[-1])
                if _has_numbers(own):
                    numbers.append((index, orjson.dumps(own, default=str)))
            except TypeError as error:
                raise BadRequestError(f"messages[{index}]: it can not be written as JSON: {error}") from error
            links.append(link)
            spelt.append(own)
        read = Conversation(tuple(canonical), tuple(links), tuple(tools), agent)
        if known is not None and size == len(known.spelt):
            self._seen.remove(known)
        self._seen.insert(0, _Seen(spelt, tuple(numbers), start.whole, read))
        del self._seen[_MAX_SEEN:]
        return read

    def _closest(self, messages: list[Mapping[str, Any]], start: bytes) -> tuple[_Seen | None, int]:
        """The request that begins with the same messages for longest."""
        best, best_size = None, 0
        for seen in self._seen:
            if seen.root != start:
                continue
            size = seen.num_equal(messages)
            if size > best_size:
                best, best_size = seen, size
            if size == len(seen.spelt):
                break
        return best, best_size


def _without_label(message: Message) -> Message:
    """A message without the name that frameworks put on a reply: the model did not say it."""
    is_labelled = message["role"] == "assistant" and "name" in message
    return {key: value for key, value in message.items() if key != "name"} if is_labelled else message


def _traits(message: Message, is_system: bool) -> Trait:
    traits = Trait(0)
    role = message["role"]
    if role == "system":
        traits |= Trait.SYSTEM if is_system else Trait.UNUSUAL
    if role == "tool" or "tool_calls" in message:
        traits |= Trait.CALLS
    if "reasoning_content" in message or any(mark in message["content"] for mark in _THINKING_MARKS):
        traits |= Trait.THINKING
    if not _USUAL_FIELDS.issuperset(message):
        traits |= Trait.UNUSUAL
    return traits


def _has_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_has_numbers(one) for one in value.values())
    if isinstance(value, str) or value is None:
        return False
    return any(_has_numbers(one) for one in value) if isinstance(value, Iterable) else True
