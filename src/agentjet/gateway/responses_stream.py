"""OpenAI's Responses as server-sent events, and the dialect.

Invariants:

- Sequence numbers count from 0 without a gap.
- Items come one after the other: one is done before the next is added. So what a model says between and after its tool
  calls is an item of its own.
- The response of the last event holds exactly the items that were streamed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from agentjet.gateway.dialect import Body, ServerEvent
from agentjet.gateway.fault import ApiError, error_body
from agentjet.gateway.responses_reply import (
    answer,
    ended,
    function_call,
    response,
    text,
    text_part,
    thinking,
    thinking_part,
)
from agentjet.gateway.responses_request import ResponsesRequest, parse_responses
from agentjet.schemas.call import FinishReason, InferDelta, InferReply, ToolCallDelta

_PIECES = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
"""What the events of an item's pieces are called."""


class EventWriter:
    """The events of one streamed response."""

    def __init__(self, request: ResponsesRequest, call: str) -> None:
        self._request = request
        self._call = call
        self._num_events = 0
        self._output: list[Body] = []
        """The last item is still open, unless the stream has ended."""
        self._num_tool_calls = 0
        self._created = response(request, call, "in_progress")

    def start(self) -> Iterator[ServerEvent]:
        """The empty response, twice, as OpenAI has it."""
        yield self._event("response.created", response=self._created)
        yield self._event("response.in_progress", response=self._created)

    def delta(self, index: int, delta: InferDelta) -> Iterator[ServerEvent]:
        """What is new; ApiError (503) when it belongs to an item that is done."""
        num_calls = self._num_tool_calls
        # First the rest of a call that is open: the new text stands behind it.
        for piece in delta.tool_calls:
            if piece.index < num_calls:
                yield from self._tool_piece(piece)
        if delta.reasoning:
            yield from self._open_text("reasoning")
            yield from self._piece(delta.reasoning)
        if delta.text:
            yield from self._open_text("message")
            yield from self._piece(delta.text)
        for piece in delta.tool_calls:
            if piece.index >= num_calls:
                yield from self._tool_piece(piece)

    def end(self, index: int, reply: InferReply) -> Iterator[ServerEvent]:
        """The end of the last item; a reply of nothing is an empty text."""
        if not any(item["type"] != "reasoning" for item in self._output):
            yield from self._open_text("message")
        is_cut = reply.finish_reason is FinishReason.LENGTH
        yield from self._close("incomplete" if is_cut else "completed")

    def finish(self, replies: Sequence[InferReply]) -> Iterator[ServerEvent]:
        """The whole response."""
        whole = ended(self._request, replies[0], self._output) | {"created_at": self._created["created_at"]}
        yield self._event(f"response.{whole['status']}", response=whole)

    def fail(self, error: ApiError) -> Iterator[ServerEvent]:
        """The response as failed, and the error in the form that makes OpenAI's clients raise it."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = self._created | {"status": "failed", "error": {"code": code, "message": str(error)}}
        yield self._event("response.failed", response=failed)
        yield ServerEvent(error_body(error), "error")

    def _open_text(self, kind: str) -> Iterator[ServerEvent]:
        if self._output and self._output[-1]["type"] == kind:
            return
        make, make_part = (text, text_part) if kind == "message" else (thinking, thinking_part)
        yield from self._open(make(self._call, len(self._output), ""), "content")
        yield self._of_item("response.content_part.added", content_index=0, part=make_part(""))

    def _open(self, item: Body, *held_back: str) -> Iterator[ServerEvent]:
        """Adds an item, without the fields that grow piece by piece."""
        yield from self._close("completed")
        self._output.append(item)
        empty = item | {"status": "in_progress"} | {name: type(item[name])() for name in held_back}
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=empty)

    def _tool_piece(self, piece: ToolCallDelta) -> Iterator[ServerEvent]:
        if piece.index == self._num_tool_calls:
            self._num_tool_calls += 1
            yield from self._open(function_call(self._call, len(self._output), piece.id, piece.name, ""))
        elif piece.index != self._num_tool_calls - 1 or self._output[-1]["type"] != "function_call":
            raise ApiError(503, "stream_interrupted", "a piece of a tool call came too late; ask again")
        if piece.arguments:
            yield from self._piece(piece.arguments)

    def _piece(self, new: str) -> Iterator[ServerEvent]:
        item = self._output[-1]
        if item["type"] == "function_call":
            item["arguments"] += new
        else:
            item["content"][0]["text"] += new
        yield self._of_item(f"response.{_PIECES[item['type']]}.delta", **self._place(item), delta=new)

    def _close(self, status: str) -> Iterator[ServerEvent]:
        """Ends the item that is open."""
        if not self._output:
            return
        item = self._output[-1]
        item["status"] = status
        name = f"response.{_PIECES[item['type']]}.done"
        if item["type"] == "function_call":
            yield self._of_item(name, arguments=item["arguments"])
        else:
            part = item["content"][0]
            yield self._of_item(name, **self._place(item), text=part["text"])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _place(self, item: Body) -> Body:
        """Fields that events of a text have and those of a tool call have not."""
        logprobs = {"logprobs": []} if item["type"] == "message" else {}
        return {} if item["type"] == "function_call" else {"content_index": 0} | logprobs

    def _of_item(self, name: str, **fields: Any) -> ServerEvent:
        """An event of the item that is open."""
        return self._event(name, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, name: str, **fields: Any) -> ServerEvent:
        event = ServerEvent({"type": name, "sequence_number": self._num_events, **fields}, name)
        self._num_events += 1
        return event


class Responses:
    """`/v1/responses`."""

    paths = ("/v1/responses",)

    def parse(self, body: Any, *, is_strict: bool) -> ResponsesRequest:
        """See `parse_responses`."""
        return parse_responses(body, is_strict=is_strict)

    def answer(self, request: ResponsesRequest, replies: Sequence[InferReply]) -> Body:
        """See `responses_reply.answer`."""
        return answer(request, replies[0])

    def writer(self, request: ResponsesRequest, response_id: str) -> EventWriter:
        """Of typed events."""
        return EventWriter(request, response_id)

    def error(self, error: ApiError) -> Body:
        """As OpenAI shapes it."""
        return error_body(error)
