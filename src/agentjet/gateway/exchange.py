"""Questions to inference and their answers over the bus.

Invariants:

- A question ends in one reply, an error, or a cancellation that inference hears of.
- A reply that is lost on the way is found in CALLS; a question that is lost, or lies in the queue of an engine that is
  gone, is published again under the same call id.
- All answers come to one inbox, so a question costs no subscription.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import structlog

from agentjet.bus import record
from agentjet.bus.clock import BusClock
from agentjet.bus.protocol import Bus, Subscription
from agentjet.errors import BusError, BusFullError, RecordError, UnknownSchemaError
from agentjet.gateway.fault import ApiError
from agentjet.gateway.placement import Placement
from agentjet.schemas import subject
from agentjet.schemas.call import Call, FinishReason, InferDelta, InferReply, InferRequest
from agentjet.schemas.codec import decode
from agentjet.schemas.event import Event
from agentjet.schemas.ids import CallId, RunId, TicketId
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
Answer = InferDelta | InferReply
Seat = asyncio.Queue[Answer]
"""Where the answers to one who waits for a call arrive."""


@dataclass(slots=True)
class _Question:
    """A question that was asked."""

    request: InferRequest
    ticket: str
    attempt: int
    place: str = subject.ANY_ENGINE
    """The engine whose queue it lies in."""
    sequence: int = 0
    """In INFER."""


class Exchange:
    """Asks inference; one for each gateway."""

    def __init__(self, bus: Bus, run: RunId, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._bus = bus
        self._run = run
        self._look_seconds = look_seconds
        self._inbox = bus.inbox()
        self._waiting: dict[CallId, set[Seat]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[None] | None = None
        self._placement = Placement(bus, run)
        self.clock = BusClock()

    async def start(self) -> None:
        """Open the inbox and learn the bus's time. BusError when the bus is away."""
        subscription = await self._bus.subscribe(self._inbox)
        self._reader = asyncio.create_task(self._read(subscription))
        event = Event(run=self._run, actor="gateway", kind="started")
        where = subject.event(self._run, event.actor, event.kind)
        sequence = await record.put(self._bus, self._run, Stream.EVENTS, where, event)
        stored = await self._bus.get(stream_name(self._run, Stream.EVENTS), sequence)
        if stored is not None:
            self.clock.observe(stored.time)

    async def close(self) -> None:
        """Close the inbox; open questions are cancelled by their askers."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2.0)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def open(self, call: CallId) -> Seat:
        """The first seat of a call that will be asked for: others can join it from now on.

        It is taken over by `ask`, or given up by `leave`.
        """
        seat: Seat = asyncio.Queue()
        self._waiting.setdefault(call, set()).add(seat)
        return seat

    def join(self, call: CallId) -> Seat | None:
        """A seat among those who wait for a call: it is not cancelled when they go. None when nobody waits.

        It is taken over by `ask`, or given up by `leave`.
        """
        return self.open(call) if call in self._waiting else None

    async def stored(self, model: str, ticket: str, attempt: int, call: CallId) -> Call | None:
        """A finished call in CALLS; None when there is none, or its caller had gone.

        Raises ApiError: 503 while nobody can tell.
        """
        try:
            return await self._stored(model, ticket, attempt, call)
        except (BusError, UnknownSchemaError) as error:
            why = f"whether the call has finished can not be read now: {error}; try again"
            raise ApiError(503, "unavailable", why) from error

    async def _stored(self, model: str, ticket: str, attempt: int, call: CallId) -> Call | None:
        where = subject.call(self._run, model, TicketId(ticket), attempt, call)
        found = await record.last(Call, self._bus, self._run, Stream.CALLS, where)
        return None if found is None or found[1].finish_reason is FinishReason.CANCELLED else found[1]

    async def ask(
        self, request: InferRequest, ticket: str, attempt: int, *, seat: Seat | None = None, holder: str = ""
    ) -> AsyncGenerator[Answer]:
        """Deltas as they come, then the reply. Closing the generator early cancels the call.

        `holder` is the engine that answered the conversation last; it is asked first.

        Raises ApiError: 429 when too many wait, 503 when the bus is away, 504 at the deadline, and what inference says.
        """
        deadline = time.monotonic() + request.deadline - self.clock.now()
        queue: Seat = seat or asyncio.Queue()
        self._waiting.setdefault(request.call, set()).add(queue)
        question = _Question(request, ticket, attempt)
        is_over = False
        try:
            question.place = await self._placement.place(request.model, holder)
            await self._publish(question)
            while not is_over:
                answer = await self._next(queue, min(self._look_seconds, deadline - time.monotonic()))
                if answer is None and time.monotonic() >= deadline:
                    raise ApiError(504, "timeout", f"model {request.model!r} did not answer in time; is its engine up?")
                if answer is None:
                    answer = await self._look(question)
                if answer is not None:
                    if isinstance(answer, InferReply):
                        is_over = True
                        self._placement.saw(request.model, answer.engine)
                    yield answer
        finally:
            self.leave(request.call, queue, is_over=is_over)

    async def _read(self, subscription: Subscription) -> None:
        try:
            async for message in subscription.messages():
                try:
                    answer = decode(message.headers, message.payload)
                except RecordError as error:
                    log.warning("an answer can not be read", error=str(error))
                    continue
                if isinstance(answer, InferDelta | InferReply):
                    for queue in self._waiting.get(answer.call, ()):
                        queue.put_nowait(answer)
        finally:
            await subscription.close()

    async def _publish(self, question: _Question) -> None:
        request = question.request
        where = subject.infer(self._run, request.model, question.place)
        ttl_seconds = max(request.deadline - self.clock.now(), 1.0)
        try:
            question.sequence = await record.put(
                self._bus, self._run, Stream.INFER, where, request, ttl_seconds=ttl_seconds, reply=self._inbox
            )
        except BusFullError as error:
            raise ApiError(429, "rate_limit_exceeded", f"too many questions wait: {error}; try again") from error
        except BusError as error:
            raise ApiError(503, "unavailable", f"the question could not be sent: {error}; try again") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise ApiError(400, "invalid_body", f"the request can not be written to the bus: {error}") from error

    async def _next(self, queue: Seat, seconds: float) -> Answer | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0.0)):
                return await queue.get()
        return None

    async def _look(self, question: _Question) -> InferReply | None:
        """After a silence: the stored reply if there is one; else ask again if nobody will answer the question."""
        request = question.request
        try:
            call = await self._stored(request.model, question.ticket, question.attempt, request.call)
            if call is not None:
                return call.reply(has_logprobs=request.num_logprobs is not None)
            if await self._is_lost(question):
                log.warning("a question was lost; asking again", call=request.call, engine=question.place)
                question.place = subject.ANY_ENGINE
                await self._publish(question)
        except BusError as error:
            log.warning("waiting for the bus", call=request.call, error=str(error))
        return None

    async def _is_lost(self, question: _Question) -> bool:
        """Not in its queue, or in that of an engine that is gone; the shared queue looks after its own."""
        if await self._bus.get(stream_name(self._run, Stream.INFER), question.sequence) is None:
            return True
        is_shared = question.place == subject.ANY_ENGINE
        return not is_shared and not await self._placement.is_there(question.request.model, question.place)

    def leave(self, call: CallId, queue: Seat, *, is_over: bool) -> None:
        """Give a seat up; the last one to go cancels a call that is not over."""
        others = self._waiting[call]
        others.discard(queue)
        if others:
            return
        del self._waiting[call]
        if not is_over:
            # In a task of its own: the caller's may be cancelled again at each wait.
            task = asyncio.create_task(self._cancel(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _cancel(self, call: CallId) -> None:
        try:
            await self._bus.send(subject.cancel(self._run, call), b"")
        except BusError as error:
            log.warning("a cancellation was not sent", call=call, error=str(error))
