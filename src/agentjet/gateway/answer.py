"""From a checked request to its response, whole or as events.

Invariants:

- A call counts as answered when its reply goes to the agent, never before.
- A stream never splices two generations: it ends in an error instead.
- Whoever stops listening cancels the calls.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from agentjet.gateway.conversation import Conversations
from agentjet.gateway.dialect import Body, ServerEvent
from agentjet.gateway.exchange import Answer, Exchange
from agentjet.gateway.fault import ApiError
from agentjet.gateway.inquiry import Inquiry
from agentjet.gateway.progress import Progress
from agentjet.schemas.call import InferDelta, InferReply, InferRequest
from agentjet.schemas.episode import CONTEXT
from agentjet.schemas.ids import RunId


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a stream has to send next."""

    index: int
    """Of the choice."""
    delta: InferDelta
    reply: InferReply | None
    """With the last piece."""


class Answerer:
    """Answers inquiries through one exchange; a call takes at most `request_seconds`."""

    def __init__(self, exchange: Exchange, run: RunId, conversations: Conversations, *, request_seconds: float) -> None:
        self._exchange = exchange
        self._conversations = conversations
        self._run = run
        self._request_seconds = request_seconds

    async def whole(self, inquiry: Inquiry) -> Body:
        """The response with all of its choices. ApiError when one of them fails."""
        tasks = [asyncio.create_task(self._reply(inquiry, index)) for index in range(len(inquiry.calls))]
        try:
            replies = await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            inquiry.lost()
            raise
        finally:
            for task in tasks:
                task.cancel()
            self.release(inquiry)
        for reply in replies:
            self._count(inquiry, reply)
        return inquiry.dialect.answer(inquiry.request, replies)

    async def stream(self, inquiry: Inquiry) -> AsyncGenerator[ServerEvent]:
        """The response's events, those of its choices as they come. ApiError when one of them fails."""
        writer = inquiry.dialect.writer(inquiry.request, inquiry.calls[0])
        merged: asyncio.Queue[_Piece | Exception] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._feed(inquiry, index, merged.put_nowait)) for index in range(len(inquiry.calls))
        ]
        replies: list[InferReply] = []
        is_over, has_begun = False, False
        try:
            while len(replies) < len(tasks):
                piece = await merged.get()
                if isinstance(piece, Exception):
                    is_over = True
                    raise piece
                inquiry.session.override((piece.reply or piece.delta).overridden)
                if not has_begun:  # only now is it certain that there is no early error with a status of its own
                    has_begun = True
                    for event in writer.start():
                        yield event
                for event in writer.delta(piece.index, piece.delta):
                    yield event
                if piece.reply is not None:
                    replies.append(piece.reply)
                    self._count(inquiry, piece.reply)
                    for event in writer.end(piece.index, piece.reply):
                        yield event
            for event in writer.finish(replies):
                yield event
            is_over = True
        except ApiError as error:
            if not has_begun:
                raise
            for event in writer.fail(error):
                yield event
        finally:
            if not is_over:
                inquiry.lost()
            for task in tasks:
                task.cancel()
            self.release(inquiry)

    def release(self, inquiry: Inquiry) -> None:
        """Give up the seats that no question has taken over."""
        while inquiry.seats:
            call, seat = inquiry.seats.popitem()
            self._exchange.leave(call, seat, is_over=call in inquiry.known)

    def _count(self, inquiry: Inquiry, reply: InferReply) -> None:
        if inquiry.request.only_counts:
            return
        inquiry.session.answered(inquiry.request.model, reply.call)
        inquiry.session.holders[inquiry.request.model, inquiry.caller.agent] = reply.engine
        inquiry.session.override(reply.overridden)
        self._conversations.add(inquiry.caller.key, inquiry.request, reply)

    async def _reply(self, inquiry: Inquiry, index: int) -> InferReply:
        async with contextlib.aclosing(self._answers(inquiry, index)) as answers:
            async for answer in answers:
                if isinstance(answer, InferReply):
                    return answer
        raise ApiError(503, "unavailable", "the call ended without a reply; try again")

    async def _answers(self, inquiry: Inquiry, index: int) -> AsyncGenerator[Answer]:
        """Deltas and the reply of one choice; an error of inference is raised."""
        known = inquiry.known.get(inquiry.calls[index])
        if known is not None:
            yield known
            return
        question, access = self._question(inquiry, index), inquiry.access
        seat = inquiry.seats.pop(question.call, None)
        holder = inquiry.session.holders.get((question.model, question.agent), "")
        asking = self._exchange.ask(question, access.ticket, access.attempt, seat=seat, holder=holder)
        async with contextlib.aclosing(asking) as answers:
            async for answer in answers:
                if isinstance(answer, InferReply) and answer.error is not None:
                    is_played = inquiry.request.model not in access.untrained
                    if answer.error.code == "context_length_exceeded" and is_played:
                        inquiry.session.stop_reason = CONTEXT
                    raise ApiError.of(answer.error)
                yield answer

    def _question(self, inquiry: Inquiry, index: int) -> InferRequest:
        request = inquiry.request
        sampling = request.sampling
        if sampling.seed is not None and index:  # choices of one seeded request differ, and are the same next time
            sampling = sampling.model_copy(update={"seed": (sampling.seed + index) % 2**63})
        latest = self._exchange.clock.now() + self._request_seconds
        return InferRequest(
            run=self._run,
            call=inquiry.calls[index],
            key=inquiry.caller.key,
            model=request.model,
            agent=inquiry.caller.agent,
            messages=request.messages,
            prompt=request.prompt,
            tools=request.tools,
            tool_choice=request.tool_choice,
            tool_name=request.tool_name,
            sampling=sampling,
            given=request.given,
            choice=index,
            stream=request.is_streamed,
            num_logprobs=0 if request.wants_logprobs else None,
            only_counts=request.only_counts,
            deadline=min(inquiry.access.expires, latest),
        )

    async def _feed(self, inquiry: Inquiry, index: int, put: Callable[[_Piece | Exception], None]) -> None:
        """Puts what to send of one choice as it comes, the reply with the last of it, or what went wrong."""
        progress = Progress()
        try:
            async with contextlib.aclosing(self._answers(inquiry, index)) as answers:
                async for answer in answers:
                    reply = answer if isinstance(answer, InferReply) else None
                    put(_Piece(index, progress.take(answer), reply))
        except Exception as error:  # noqa: BLE001  (raised again where the response is written)
            put(error)
