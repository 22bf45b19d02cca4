"""The gateway: requests of agents, by HTTP or by call, turned into questions on the bus.

Invariants:

- Two equal requests are two samples. A request is the same call only by its idempotency key, or by the retry mark of
  the vendors' clients after the first answer could not be delivered; and then only if that call was finished or still
  runs.
- A session lists the answered calls of a key, in order: what its episode's end says.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson

from agentjet.bus.protocol import Bus
from agentjet.config.settings import GatewaySettings
from agentjet.gateway.access import Access
from agentjet.gateway.answer import Answerer
from agentjet.gateway.chat_reply import ChatCompletions
from agentjet.gateway.conversation import Conversations
from agentjet.gateway.dialect import Body, Dialect, ServerEvent
from agentjet.gateway.endpoint import build_app
from agentjet.gateway.exchange import Exchange
from agentjet.gateway.fault import ApiError
from agentjet.gateway.inquiry import Caller, Inquiry
from agentjet.gateway.limit import Limits
from agentjet.gateway.server import HttpServer
from agentjet.gateway.session import Session
from agentjet.schemas.ids import CallId, RunId, new_call_id

_MAX_SESSIONS = 8192
_CHAT = ChatCompletions()


class Gateway:
    """The endpoint of one run."""

    def __init__(self, bus: Bus, run: RunId, settings: GatewaySettings) -> None:
        self._settings = settings
        self._access = Access(bus, run)
        self._exchange = Exchange(bus, run)
        self._conversations = Conversations()
        self._answerer = Answerer(self._exchange, run, self._conversations, request_seconds=settings.request_seconds)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._limits = Limits(settings)
        app = build_app(self, self._limits)
        self._server = HttpServer(app, host=settings.host, port=settings.port)
        self._opening = asyncio.Lock()
        self._is_open = False
        self.base_url = ""
        """For OpenAI's clients; empty before `start`."""

    async def start(self) -> str:
        """Listen; returns the base URL for OpenAI's clients.

        Raises UserError when the address can not be had, BusError when the bus is away.
        """
        await self._open()
        port = await self._server.start()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        return self.base_url

    async def close(self) -> None:
        """Stop listening and answering. Idempotent."""
        await self._server.close()
        await self._exchange.close()
        self._is_open = False

    def session(self, key: str) -> Session:
        """What this gateway answered to a key; empty for one that it has not seen."""
        session = self._sessions.setdefault(key, Session())
        self._sessions.move_to_end(key)
        while len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def forget(self, key: str) -> None:
        """The key's episode is over."""
        self._sessions.pop(key, None)
        self._conversations.forget(key)
        self._access.forget(key)

    async def models(self, key: str) -> tuple[str, ...]:
        """Names of the models that a key may call. ApiError when the key is refused."""
        await self._open()
        return (await self._access.check(key)).models

    async def complete(self, key: str, body: dict[str, Any], *, agent: str = "") -> dict[str, Any]:
        """A chat completion without HTTP.

        Raises ApiError, which says what OpenAI's API would answer.
        """
        inquiry = await self.inquire(Caller(key, agent), body, _CHAT)
        if inquiry.request.is_streamed:
            raise ApiError(400, "unsupported_parameter", "stream: only over HTTP", param="stream")
        return await self._answerer.whole(inquiry)

    async def inquire(self, caller: Caller, body: Any, dialect: Dialect) -> Inquiry:
        """Check a request and choose its calls. ApiError when it is refused."""
        await self._open()
        access = await self._access.check(caller.key)
        session = self.session(caller.key)
        session.num_requests += 1
        is_untrained = isinstance(body, dict) and body.get("model") in access.untrained
        digest = _digest([caller.agent, dialect.paths, body])
        asked_for = dialect.parse(body, is_strict=self._settings.is_strict and not is_untrained)
        request = self._conversations.continued(caller.key, asked_for)
        self._limits.check_messages(len(request.messages))
        if request.model not in access.models:
            why = f"model {request.model!r} is not served here; ask for one of: {', '.join(access.models)}"
            raise ApiError(404, "model_not_found", why, param="model")
        session.override(request.lifted)
        inquiry = Inquiry(caller, session, dialect, request, access, digest)
        # One at a time: of two equal requests with one idempotency key the second one waits for the first one's calls.
        async with session.choosing:
            await self._choose_calls(inquiry)
        return inquiry

    async def answer(self, inquiry: Inquiry) -> Body:
        """The whole response. ApiError when it fails; cancelling cancels its calls."""
        return await self._answerer.whole(inquiry)

    def stream(self, inquiry: Inquiry) -> AsyncGenerator[ServerEvent]:
        """The response's events. ApiError when it fails before the first; closing early cancels its calls."""
        return self._answerer.stream(inquiry)

    async def _open(self) -> None:
        async with self._opening:
            if not self._is_open:
                await self._exchange.start()
                self._is_open = True

    async def _choose_calls(self, inquiry: Inquiry) -> None:
        session, caller = inquiry.session, inquiry.caller
        before: Sequence[CallId] = ()
        if caller.idempotency_key:
            before = session.calls_of(caller.idempotency_key, inquiry.digest)
        elif caller.is_retry:
            before = session.undelivered.pop(inquiry.digest, ())
        num_choices = inquiry.request.num_choices
        is_usable = False
        try:
            is_usable = len(before) == num_choices and await self._are_usable(inquiry, before)
        except (ApiError, asyncio.CancelledError):
            if not caller.idempotency_key:
                session.undelivered[inquiry.digest] = list(before)  # for the next retry
            raise
        finally:
            if not is_usable:
                self._answerer.release(inquiry)
        if is_usable:
            inquiry.calls = list(before)
        else:
            inquiry.known.clear()
            inquiry.calls = [new_call_id() for _ in range(num_choices)]
            inquiry.seats = {call: self._exchange.open(call) for call in inquiry.calls}
        if caller.idempotency_key:
            session.idempotent[caller.idempotency_key] = inquiry.digest, inquiry.calls

    async def _are_usable(self, inquiry: Inquiry, calls: Sequence[CallId]) -> bool:
        """Whether each of an earlier request's calls is finished, or still runs for someone else."""
        access = inquiry.access
        for call in calls:
            # Before anything is awaited: the last one to leave an open call cancels it.
            seat = self._exchange.join(call)
            if seat is not None:
                inquiry.seats[call] = seat
            stored = await self._exchange.stored(inquiry.request.model, access.ticket, access.attempt, call)
            if stored is not None:
                inquiry.known[call] = stored.reply()
            elif seat is None:
                return False
        return True


def _digest(asked: list[Any]) -> str:
    """ApiError (400) for a body that can not be written again."""
    try:
        text = orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise ApiError(400, "invalid_body", f"the body is nested too deeply: {error}") from None
    return hashlib.sha256(text).hexdigest()
