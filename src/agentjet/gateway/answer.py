"""From a checked request to its completion, whole or in chunks.

Invariants:

- A call counts as answered when its reply goes to the agent, never before.
- A stream never splices two generations: it ends in an error instead.
- Whoever stops listening cancels the calls.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from agentjet.gateway.exchange import Answer, Exchange
from agentjet.gateway.fault import ApiError
from agentjet.gateway.inquiry import Inquiry
from agentjet.gateway.response import ChunkWriter, completion
from agentjet.schemas.call import InferDelta, InferReply, InferRequest
from agentjet.schemas.episode import CONTEXT
from agentjet.schemas.ids import RunId

Chunk = dict[str, Any]


class Answerer:
    """Answers inquiries through one exchange; a call takes at most `request_seconds`."""

    def __init__(self, exchange: Exchange, run: RunId, *, request_seconds: float) -> None:
        self._exchange = exchange
        self._run = run
        self._request_seconds = request_seconds

    async def whole(self, inquiry: Inquiry) -> dict[str, Any]:
        """The completion with all of its choices. ApiError when one of them fails."""
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
        return completion(inquiry.request, replies)

    async def stream(self, inquiry: Inquiry) -> AsyncGenerator[Chunk]:
        """The completion's chunks, those of its choices as they come. ApiError when one of them fails."""
        writer = ChunkWriter(inquiry.request, inquiry.calls[0])
        merged: asyncio.Queue[Chunk | InferReply | Exception] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._feed(inquiry, index, writer, merged.put_nowait))
            for index in range(len(inquiry.calls))
        ]
        replies: list[InferReply] = []
        is_over = False
        try:
            while len(replies) < len(tasks):
                item = await merged.get()
                if isinstance(item, Exception):
                    is_over = True
                    raise item
                if isinstance(item, InferReply):
                    replies.append(item)
                else:
                    yield item
            if inquiry.request.wants_usage:
                yield writer.usage(replies)
            is_over = True
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
        inquiry.session.answered(inquiry.request.model, reply.call)
        inquiry.session.override(reply.overridden)

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
        asking = self._exchange.ask(question, access.ticket, access.attempt, seat=seat)
        async with contextlib.aclosing(asking) as answers:
            async for answer in answers:
                if isinstance(answer, InferReply) and answer.error is not None:
                    if answer.error.code == "context_length_exceeded":
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
            tools=request.tools,
            sampling=sampling,
            given=request.given,
            choice=index,
            stream=request.is_streamed,
            num_logprobs=0 if request.wants_logprobs else None,
            deadline=min(inquiry.access.expires, latest),
        )

    async def _feed(self, inquiry: Inquiry, index: int, writer: ChunkWriter, put: Callable[[Any], None]) -> None:
        """Puts one choice's chunks and then its reply, or what went wrong."""
        sent, generation, is_first = "", "", True
        try:
            async with contextlib.aclosing(self._answers(inquiry, index)) as answers:
                async for answer in answers:
                    if sent and answer.generation != generation:
                        raise _interrupted("the engine was lost in the middle of the reply")
                    generation = answer.generation
                    text = answer.text if isinstance(answer, InferDelta) else _rest(answer, sent)
                    if text or is_first:
                        put(writer.text(index, text, is_first=is_first))
                        sent, is_first = sent + text, False
                    if isinstance(answer, InferReply):
                        self._finish(inquiry, index, writer, answer, put)
        except Exception as error:  # noqa: BLE001  (raised again where the response is written)
            put(error)

    def _finish(
        self, inquiry: Inquiry, index: int, writer: ChunkWriter, reply: InferReply, put: Callable[[Any], None]
    ) -> None:
        if reply.message.get("tool_calls"):
            put(writer.tool_calls(index, reply))
        put(writer.end(index, reply))
        self._count(inquiry, reply)
        put(reply)


def _rest(reply: InferReply, sent: str) -> str:
    content = reply.message.get("content") or ""
    if not content.startswith(sent):
        raise _interrupted("the stored reply is not the one that was streamed")
    return content[len(sent) :]


def _interrupted(why: str) -> ApiError:
    return ApiError(503, "stream_interrupted", f"{why}; ask again")
