"""A bus with the streams of a run, a claimed ticket, and a service with a scripted engine."""

import asyncio
import time
from contextlib import asynccontextmanager

from chat_models import CHATML, RUN, Chat
from hand_played import SECRET
from scripted_engine import ScriptedEngine

from agentjet.accounting.key import Key, sign, verify
from agentjet.bus import record
from agentjet.errors import KeyRejectedError
from agentjet.inference.service import InferenceService
from agentjet.schemas import subject
from agentjet.schemas.call import Call, InferDelta, InferReply, InferRequest
from agentjet.schemas.claim import Authorization, Claim
from agentjet.schemas.codec import decode, encode
from agentjet.schemas.ids import GroupId, TicketId, new_call_id
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.subject import Stream, stream_name
from agentjet.schemas.task import Ticket

MODEL = "m"


class SmallSwarm:
    """One run, model `m`, on a memory bus."""

    def __init__(self, bus, reply="hi", *, template=CHATML, models=(MODEL,), untrained=(), **options) -> None:
        self.bus = bus
        self.chat = Chat(template)
        self.engine = ScriptedEngine(self.chat, reply, **options)
        self.models, self.untrained = models, untrained
        self.service = self.new_service()

    def new_service(self, model=MODEL, **options) -> InferenceService:
        return InferenceService(
            self.bus,
            RUN,
            model,
            options.pop("engine", self.engine),
            self.chat.tokenizer,
            secret=SECRET,
            served_models=(*self.models, *self.untrained),
            stop_ids=frozenset({self.chat.end}),
            **options,
        )

    async def prepare(self) -> None:
        for spec in record.stream_specs(RUN, max_bytes=1 << 30):
            await self.bus.ensure_stream(spec)

    async def claim(self, *, group="g-0", member=0, worker="w", **fields) -> str:
        """Claims a ticket and returns the attempt's key."""
        ticket = Ticket(
            run=RUN,
            pool="g",
            group=GroupId(group),
            member=member,
            group_size=4,
            models=self.models,
            seed=7,
            deadline_seconds=600.0,
            **fields,
        )
        where = subject.claim(RUN, ticket.id)
        attempt = await record.put(self.bus, RUN, Stream.CLAIMS, where, Claim(ticket=ticket, worker=worker))
        return sign(SECRET, Key(run=RUN, ticket=ticket.id, attempt=attempt, expires=time.time() + 600))

    def request(self, key, messages, **fields) -> InferRequest:
        defaults = {"model": MODEL, "sampling": Sampling(), "given": (), "deadline": time.time() + 60}
        return InferRequest(
            run=RUN, call=fields.pop("call", new_call_id()), key=key, messages=tuple(messages), **defaults | fields
        )

    async def post(self, request: InferRequest, inbox: str) -> None:
        where = subject.infer(RUN, request.model)
        await record.put(self.bus, RUN, Stream.INFER, where, request, reply=inbox)

    async def ask(self, request: InferRequest) -> tuple[list[InferDelta], InferReply]:
        """Sends a request and returns its deltas and its reply."""
        inbox = self.bus.inbox()
        subscription = await self.bus.subscribe(inbox)
        await self.post(request, inbox)
        return await collect(subscription)

    async def calls(self) -> list[Call]:
        scan = self.bus.scan(stream_name(RUN, Stream.CALLS))
        return [await record.read_as(Call, self.bus, RUN, Stream.CALLS, message) async for message in scan]

    async def authorize(self, request):
        key_text = decode(request.headers, request.payload).key
        try:
            key = verify(SECRET, key_text, run=RUN, now=time.time())
        except KeyRejectedError as error:
            answer = Authorization(granted=False, reason=str(error))
        else:
            newest = await self.bus.last(stream_name(RUN, Stream.CLAIMS), subject.claim(RUN, TicketId(key.ticket)))
            is_newest = newest is not None and newest.sequence == key.attempt
            answer = Authorization(
                granted=is_newest,
                reason="" if is_newest else "superseded",
                ticket=key.ticket,
                attempt=key.attempt,
                models=(*self.models, *self.untrained),
                untrained=self.untrained,
                expires=key.expires,
            )
        headers, body = encode(answer)
        return body, headers

    @asynccontextmanager
    async def running(self):
        """The service and key checks at work."""
        await self.prepare()
        async with self.bus.serve(subject.authorize_service(RUN), self.authorize, queue="curriculum"):
            task = asyncio.create_task(self.service.run())
            await asyncio.sleep(0.01)
            try:
                yield self
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


async def collect(subscription) -> tuple[list[InferDelta], InferReply]:
    """Deltas up to the reply."""
    deltas = []
    while True:
        message = await subscription.next(30.0)
        answer = decode(message.headers, message.payload)
        if isinstance(answer, InferReply):
            return deltas, answer
        deltas.append(answer)
