"""The inference service: questions of gateways become generations of one engine, and durable calls.

Invariants:

- The call is stored (create-only) before its reply is sent, and what is replied is what is stored.
- One call id has one generation here: a duplicate joins the one that runs, or gets what is stored.
- Every question gets one answer, an error included, unless its caller has gone or its deadline has passed.
- A caller that goes away ends its generation; what was drawn is stored as cancelled and belongs to no episode's end.
- Without a free place it takes nothing that another engine could take; its own queue holds what it promised to take.

It owns tokens (through `chat`), not weights: whoever loads them decides when new generations may begin (`admit`).
"""

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import cast

import structlog

from agentjet.bus import record
from agentjet.bus.clock import BusClock
from agentjet.bus.handler import PostponeError, consume
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.chat.reply_format import ReplyFormat
from agentjet.chat.template import ChatTemplate
from agentjet.chat.tokenizer import Tokenizer
from agentjet.errors import EngineEndedError, EngineError, ModelNotServedError, RecordError, RecordTooLargeError
from agentjet.inference.draft import Draft
from agentjet.inference.drafter import Drafter
from agentjet.inference.engine import Draw, Engine, Generation
from agentjet.inference.fence import Fence, Permit
from agentjet.inference.gate import Gate, is_equal, pass_at_once
from agentjet.inference.history import HistoryCache
from agentjet.inference.refusal import REFUSALS, ReplyTooLargeError, VersionUnavailableError, call_error
from agentjet.inference.room import Room
from agentjet.schemas import subject
from agentjet.schemas.call import Call, InferReply, InferRequest, Usage
from agentjet.schemas.ids import CallId, RunId, Version
from agentjet.schemas.record import Record
from agentjet.schemas.room import RoomGrant, RoomRequest
from agentjet.schemas.subject import Stream, stream_name

log = structlog.get_logger(__name__)

SILENT_SECONDS = 5.0
"""How long a question may lie at an engine that gives no sign of life before another one gets it."""
_FORGOTTEN_SECONDS = 60.0
"""How long the queue of an engine that is gone is kept; its questions are asked again by the gateways."""
_MAX_CANCELLED = 4096
_ENDED_SECONDS = 1.0
_MAX_OWN = 1024


@dataclass(slots=True)
class _Running:
    request: InferRequest
    inboxes: set[str]
    draft: Draft | None = None
    drawing: asyncio.Task[None] | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.drawing is not None:
            self.drawing.cancel()


class InferenceService:
    """Answers the questions to one model with one engine.

    Args:
        bus: Where questions come from and calls are stored.
        run: The run that is served.
        model: Name of the model, as agents ask for it.
        engine: Started engine.
        tokenizer: The model's tokenizer, with a chat template.
        secret: The run's secret, for keys.
        served_models: Every model name of the run, to tell an agent that asks for another.
        stop_ids: Tokens that end a reply.
        engine_name: Token that names the engine in subjects and records; no other engine of the run has it.
        num_places: Requests that it takes at once.
        admit: Awaited before each unpinned generation; holds it while new weights are on their way.
        is_same: Whether two versions name the same weights.
        reply_format: How the model writes tool calls and thinking; None tells it from the chat template.
    """

    def __init__(
        self,
        bus: Bus,
        run: RunId,
        model: str,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        secret: bytes,
        served_models: tuple[str, ...],
        stop_ids: frozenset[int],
        engine_name: str = "engine",
        num_places: int = 64,
        admit: Callable[[], Awaitable[None]] = pass_at_once,
        is_same: Callable[[Version, Version], bool] = is_equal,
        reply_format: ReplyFormat | None = None,
    ) -> None:
        self._bus = bus
        self._run = run
        self._model = model
        self._engine = engine
        self._served_models = served_models
        self._stop_ids = stop_ids
        self._template = ChatTemplate(tokenizer, reply_format=reply_format)
        self._clock = BusClock()
        self._fence = Fence(bus, run, secret, self._clock)
        self._histories = HistoryCache(bus, run, model, self._template, stop_ids)
        self._drafter = Drafter(model, self._template, self._histories, stop_ids=stop_ids, engine_name=engine_name)
        self._name = engine_name
        self._room = Room(num_places)
        self._gate = Gate(engine, admit, is_same)
        self._running: dict[CallId, _Running] = {}
        self._cancelled: OrderedDict[CallId, None] = OrderedDict()
        self._counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Serve for ever; ends by cancellation, or BusUnavailableError when the bus is gone for good."""
        where = subject.engine_service(self._run, self._model, self._name)
        async with (
            self._bus.serve(where, record.answering(RoomRequest, self._grant), queue=self._name),
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self._listen_for_cancels())
            group.create_task(self._consume(subject.ANY_ENGINE, allowance=self._room.allowance))
            group.create_task(self._consume(self._name, inactive_seconds=_FORGOTTEN_SECONDS))

    async def _consume(
        self, place: str, *, allowance: Callable[[], Awaitable[int]] | None = None, inactive_seconds: float = 0.0
    ) -> None:
        consumer = await self._bus.consumer(
            stream_name(self._run, Stream.INFER),
            f"infer-{self._model}-{place}",
            subject=subject.infer(self._run, self._model, place),
            ack_wait_seconds=SILENT_SECONDS,
            inactive_seconds=inactive_seconds,
        )
        await consume(
            consumer,
            self.handle,
            name=f"inference {self._model}",
            on_poison=self.give_up,
            concurrency=_MAX_OWN,
            in_progress_seconds=SILENT_SECONDS / 3,
            allowance=allowance,
        )

    async def _grant(self, request: RoomRequest) -> RoomGrant:
        return RoomGrant(has_room=self._room.promise() if request.is_promise else self._room.num_free > 0)

    def weights_changed(self) -> None:
        """The engine serves another version: calls that are pinned to one look again."""
        self._gate.weights_changed()

    def metrics(self) -> dict[str, float]:
        """Counters since the start, and the load of now."""
        load = self._engine.load
        now = {
            "num_running": float(load.num_running),
            "num_waiting": float(load.num_waiting + self._gate.num_waiting),
            "num_places": float(self._room.num_places),
            "num_free_places": float(self._room.num_free),
            "num_cached_tokens": float(load.num_cached_tokens),
            "tokens_per_second": load.tokens_per_second,
            "num_template_distrusted": float(self._histories.num_distrusted),
        }
        return now | {name: float(count) for name, count in sorted(self._counts.items())}

    async def handle(self, message: StoredMessage) -> None:
        """Answer one INFER message; returning means that it can be acknowledged.

        Raises RecordError, UnknownSchemaError and BusError, PostponeError where another engine had better take it, also
        once this one has ended;
        crashes of the engine's code pass through.
        """
        is_own = message.subject.endswith(f".{self._name}")
        if not (is_own or self._room.num_free):  # the last place went while this fetch was under way
            raise PostponeError("every place of this engine is taken", delay_seconds=0.0)
        with self._room.taken(is_promised=is_own):
            await self._handle(message)

    async def _handle(self, message: StoredMessage) -> None:
        request = await record.read_as(InferRequest, self._bus, self._run, Stream.INFER, message)
        inbox = message.headers.get(record.REPLY_HEADER, "")
        self._clock.observe(message.time)
        same = self._running.get(request.call)
        if same is not None:
            same.inboxes.add(inbox)
            return
        if self._clock.now() > request.deadline or request.call in self._cancelled:
            self._counts["num_dropped"] += 1
            return
        running = self._running[request.call] = _Running(request, {inbox})
        try:
            reply = await self._answer(running)
        except EngineEndedError as error:
            if running.draft is not None and running.draft.ids:
                reply = self._refuse(request.call, error)
            else:  # Answered here, the queue's calls would all fail before this process has ended.
                raise PostponeError(str(error), delay_seconds=_ENDED_SECONDS) from error
        except REFUSALS as error:
            reply = self._refuse(request.call, error)
        finally:
            del self._running[request.call]
        if reply is None:
            return
        try:
            await self._tell(running, reply)
        except RecordTooLargeError as error:
            await self._tell(running, self._refuse(request.call, ReplyTooLargeError(str(error))))

    async def give_up(self, message: StoredMessage, error: Exception) -> None:
        """Answer a message that crashed its handler again and again."""
        try:
            request = await record.read_as(InferRequest, self._bus, self._run, Stream.INFER, message)
        except RecordError:
            log.error("an INFER message is no request; dropped", subject=message.subject, sequence=message.sequence)
            return
        inbox = message.headers.get(record.REPLY_HEADER, "")
        await self._tell(_Running(request, {inbox}), self._refuse(request.call, error))

    def cancel(self, call: CallId) -> None:
        """The caller of a call went away."""
        self._cancelled[call] = None
        while len(self._cancelled) > _MAX_CANCELLED:
            self._cancelled.popitem(last=False)
        running = self._running.get(call)
        if running is not None:
            running.cancel()

    async def _listen_for_cancels(self) -> None:
        subscription = await self._bus.subscribe(subject.cancels_of(self._run))
        try:
            async for message in subscription.messages():
                self.cancel(CallId(message.subject.rpartition(".")[2]))
        finally:
            await subscription.close()

    async def _answer(self, running: _Running) -> InferReply | None:
        request = running.request
        permit = await self._fence.admit(request.key)
        self._check_model(request, permit)
        ticket, attempt = permit.ticket.id, permit.attempt
        history = await self._histories.get(ticket, attempt)
        where = subject.call(self._run, self._model, ticket, attempt, request.call)
        if request.call in history:
            found = await record.last(Call, self._bus, self._run, Stream.CALLS, where)
            if found is not None:
                return self._reply(request, found[1])
        if request.only_counts:
            prompt = await self._drafter.prompt(request, permit)
            return InferReply(call=request.call, usage=Usage(prompt_tokens=len(prompt.ids), completion_tokens=0))
        running.draft = draft = await self._drafter.draft(request, permit, len(history))
        await self._draw(running, draft)
        if running.is_cancelled and not draft.ids:
            return None
        stored = await record.put_once(self._bus, self._run, Stream.CALLS, where, draft.call())
        if not isinstance(stored.record, Call):
            raise RecordError(f"{where}: a {stored.record.schema_name} record stands where a call belongs")
        history.add(stored.record, prompt=draft.prompt if stored.is_ours else None)
        self._count(stored.record)
        return None if running.is_cancelled else self._reply(request, stored.record)

    def _check_model(self, request: InferRequest, permit: Permit) -> None:
        if request.model != self._model or request.model not in self._served_models:
            names = ", ".join(self._served_models)
            raise ModelNotServedError(f"model {request.model!r} is not served here; ask for one of: {names}")
        if request.run != self._run:
            raise ModelNotServedError(f"run {request.run} is not served here, {self._run} is; use this run's gateway")

    async def _draw(self, running: _Running, draft: Draft) -> None:
        """Until the draft is finished or its caller has gone."""
        if running.is_cancelled:
            return
        running.drawing = asyncio.create_task(self._generate(running, draft))
        try:
            await running.drawing
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if not running.is_cancelled or (this is not None and this.cancelling()):
                raise

    async def _generate(self, running: _Running, draft: Draft) -> None:
        request = draft.request
        pin = draft.permit.ticket.pins.get(self._model)
        await self._gate.enter(pin, request.deadline - self._clock.now())
        generation = Generation(draft.generation, draft.prompt.ids, draft.sampling, self._stop_ids)
        draws = cast("AsyncGenerator[Draw]", self._engine.generate(generation))  # by contract it can be closed
        async with contextlib.aclosing(draws):
            async for draw in draws:
                if draw.ids and not self._gate.may_answer(pin, draw.version):
                    raise VersionUnavailableError(f"the weights changed from {pin} to {draw.version} under the call")
                for delta in draft.deltas(draw):
                    await self._tell(running, delta)
        if draft.finish is None:
            raise EngineError(f"call {request.call}: the engine ended without a finish reason")

    def _reply(self, request: InferRequest, call: Call) -> InferReply:
        if request.num_logprobs is None:
            return call.reply(has_logprobs=False)
        return call.reply(tuple(self._template.decode([token], with_specials=True) for token in call.completion_ids))

    def _refuse(self, call: CallId, error: Exception) -> InferReply:
        answer = call_error(error)
        self._counts[f"num_failed_{answer.code}"] += 1
        log.info("call refused", call=call, status=answer.status, code=answer.code, reason=answer.message)
        return InferReply(call=call, error=answer)

    def _count(self, call: Call) -> None:
        self._counts["num_calls"] += 1
        self._counts["num_prompt_tokens"] += call.usage.prompt_tokens
        self._counts["num_cached_prompt_tokens"] += call.usage.cached_tokens
        self._counts["num_completion_tokens"] += call.usage.completion_tokens
        self._counts["num_drifted"] += call.is_drifted
        self._counts[f"num_fork_{call.fork.value}"] += 1

    async def _tell(self, running: _Running, answer: Record) -> None:
        for inbox in running.inboxes:
            if inbox:
                await record.tell(self._bus, inbox, answer)
