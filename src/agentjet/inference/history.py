"""Token histories of the attempts that play now: a bounded cache of CALLS.

Invariants:

- What is cached can be thrown away at any time: a miss reads the attempt's calls back from CALLS.
- Calls of one attempt may be answered by several engines; a request that shows an unknown reply makes this one look
  again before it renders afresh.
"""

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from agentjet.bus import record
from agentjet.bus.protocol import Bus
from agentjet.chat.conversation import Conversation
from agentjet.chat.history import History, Prompt
from agentjet.chat.locality import Locality
from agentjet.chat.template import ChatTemplate
from agentjet.chat.text_history import TextPrompt
from agentjet.schemas import subject
from agentjet.schemas.call import Call
from agentjet.schemas.ids import CallId, RunId, TicketId
from agentjet.schemas.subject import Stream, stream_name

_LONG_CHARS = 16_000
"""Characters from which rendering and encoding take longer (milliseconds) than changing threads."""

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Entry:
    history: History
    is_loaded: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class HistoryCache:
    """Histories by (ticket, attempt) for one model."""

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        model: str,
        template: ChatTemplate,
        stop_ids: frozenset[int],
        *,
        max_attempts: int = 1024,
    ) -> None:
        self._bus = bus
        self._run = run
        self._model = model
        self._template = template
        self._locality = Locality(template)
        self._stop_ids = stop_ids
        self._max_attempts = max_attempts
        # One thread: tokenizers are not made to be called by several.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="agentjet-render")
        self._entries: OrderedDict[tuple[TicketId, int], _Entry] = OrderedDict()

    @property
    def num_distrusted(self) -> int:
        """Times that a rendering of a conversation's end was found to differ from the whole rendering."""
        return self._locality.num_distrusted

    async def get(self, ticket: TicketId, attempt: int) -> History:
        """The history of an attempt, read from CALLS where it is not at hand."""
        entry = self._entries.get((ticket, attempt))
        if entry is None:
            entry = self._entries[ticket, attempt] = _Entry(History(self._template, self._stop_ids, self._locality))
            while len(self._entries) > self._max_attempts:
                self._entries.popitem(last=False)
        self._entries.move_to_end((ticket, attempt))
        async with entry.lock:
            if not entry.is_loaded:
                await self._read(entry.history, ticket, attempt)
                entry.is_loaded = True
        return entry.history

    async def prompt(
        self,
        ticket: TicketId,
        attempt: int,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] = (),
        agent: str = "",
        forced: str = "",
    ) -> Prompt:
        """The prompt of a request; arguments and BadRequestError as `History.prompt`."""
        history = await self.get(ticket, attempt)
        conversation = history.read(messages, tools=tools, agent=agent)
        prompt = await self._render(history, conversation, forced)
        if not prompt.misses_reply or not await self._read(history, ticket, attempt):
            return prompt
        return await self._render(history, conversation, forced)

    async def text_prompt(self, ticket: TicketId, attempt: int, text: str, *, agent: str = "") -> TextPrompt:
        """The prompt of a request that no template renders."""
        history = await self.get(ticket, attempt)
        prompt = await self._encode(history, text, agent)
        if not prompt.misses_reply or not await self._read(history, ticket, attempt):
            return prompt
        return await self._encode(history, text, agent)

    async def _encode(self, history: History, text: str, agent: str) -> TextPrompt:
        """A long text is encoded in a thread, for it would hold up every other stream."""
        if len(text) < _LONG_CHARS:
            return history.texts.prompt(text, agent=agent)
        work = functools.partial(history.texts.prompt, text, agent=agent)
        return await asyncio.get_running_loop().run_in_executor(self._renderer, work)

    async def _render(self, history: History, conversation: Conversation, forced: str) -> Prompt:
        """The prompt; a long one is rendered and encoded in a thread, for it would hold up every other stream."""
        new = conversation.messages[-history.num_new_messages(conversation) :]
        if sum(len(message["content"]) for message in new) < _LONG_CHARS:
            return history.prompt_for(conversation, forced=forced)
        work = functools.partial(history.prompt_for, conversation, forced=forced)
        return await asyncio.get_running_loop().run_in_executor(self._renderer, work)

    async def _read(self, history: History, ticket: TicketId, attempt: int) -> int:
        """Adds the stored calls that the history lacks; returns how many."""
        pattern = subject.calls_of(self._run, ticket, attempt, self._model)
        found = await self._bus.last_many(stream_name(self._run, Stream.CALLS), [pattern])
        num_before = len(history)
        unknown = (one for one in found.values() if CallId(one.subject.rpartition(".")[2]) not in history)
        for message in sorted(unknown, key=lambda message: message.sequence):
            call = await record.read_as(Call, self._bus, self._run, Stream.CALLS, message)
            if call.parent is not None and call.parent not in history:
                log.warning("a call's parent is not in CALLS any more", call=call.call, parent=call.parent)
                continue
            history.add(call)
        return len(history) - num_before
