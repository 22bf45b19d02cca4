"""The events of a streamed message, as Anthropic's clients put them together.

`message_start`; each content block's start, deltas and stop, one block after another; `message_delta` with the stop
reason and the counts; `message_stop`. The start waits for the first tokens, which bring the counts of the prompt.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from agentjet.gateway.dialect import ServerEvent
from agentjet.gateway.fault import ApiError
from agentjet.gateway.messages_block import opened
from agentjet.gateway.messages_shape import error_shape, message_head, stop_fields, usage_shape
from agentjet.schemas.call import InferDelta, InferReply, ToolCallDelta, Usage

_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""For each type of block: the type of its deltas, and the field with the new text."""


class MessageWriter:
    """Writes one message."""

    def __init__(self, model: str, response_id: str) -> None:
        self._model = model
        self._id = response_id
        self._has_begun = False
        self._open = ""
        """Type of the block that is being written; empty between blocks."""
        self._num_blocks = 0
        self._num_calls = 0

    def start(self) -> Iterator[ServerEvent]:
        """Nothing yet."""
        yield from ()

    def delta(self, index: int, delta: InferDelta) -> Iterator[ServerEvent]:
        """The start of the message before its first piece, and what is new in its blocks.

        Raises ApiError (503) for a piece of a tool call whose block is over.
        """
        yield from self._begin(delta.usage)
        num_calls = self._num_calls
        # First the rest of a call that is open: the new text stands behind it.
        for piece in delta.tool_calls:
            if piece.index < num_calls:
                yield from self._continue(piece)
        if delta.reasoning:
            yield from self._write("thinking", delta.reasoning)
        if delta.text:
            yield from self._write("text", delta.text)
        for piece in delta.tool_calls:
            if piece.index >= num_calls:
                yield from self._call(piece)

    def end(self, index: int, reply: InferReply) -> Iterator[ServerEvent]:
        """The end of the last block."""
        yield from self._begin(reply.usage)
        yield from self._close()

    def finish(self, replies: Sequence[InferReply]) -> Iterator[ServerEvent]:
        """Why it stopped, the counts, and the end."""
        (reply,) = replies
        yield _event("message_delta", delta=stop_fields(reply), usage=usage_shape(reply.usage))
        yield _event("message_stop")

    def fail(self, error: ApiError) -> Iterator[ServerEvent]:
        """An error in place of all that is missing."""
        yield ServerEvent(error_shape(error), "error")

    def _begin(self, usage: Usage | None) -> Iterator[ServerEvent]:
        if self._has_begun:
            return
        self._has_begun = True
        counts = usage or Usage(prompt_tokens=0, completion_tokens=0)  # lost on the way: those at the end are whole
        message = message_head(self._model, self._id) | {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("message_start", message=message | {"usage": usage_shape(counts)})
        yield _event("ping")

    def _write(self, kind: str, text: str) -> Iterator[ServerEvent]:
        if self._open != kind:
            yield from self._start(kind)
        yield self._piece(*_DELTAS[kind], text)

    def _call(self, piece: ToolCallDelta) -> Iterator[ServerEvent]:
        if piece.index == self._num_calls:
            self._num_calls += 1
            yield from self._start("tool_use", id=piece.id, name=piece.name)
        yield from self._continue(piece)

    def _continue(self, piece: ToolCallDelta) -> Iterator[ServerEvent]:
        if self._open != "tool_use" or piece.index != self._num_calls - 1:
            raise ApiError(503, "stream_interrupted", "a piece of a tool call came after its end; ask again")
        if piece.arguments:
            yield self._piece(*_DELTAS["tool_use"], piece.arguments)

    def _start(self, kind: str, **fields: Any) -> Iterator[ServerEvent]:
        yield from self._close()
        self._open = kind
        yield _event("content_block_start", index=self._num_blocks, content_block=opened(kind, **fields))

    def _close(self) -> Iterator[ServerEvent]:
        if not self._open:
            return
        if self._open == "thinking":
            yield self._piece("signature_delta", "signature", self._id)
        yield _event("content_block_stop", index=self._num_blocks)
        self._open = ""
        self._num_blocks += 1

    def _piece(self, kind: str, name: str, text: str) -> ServerEvent:
        return _event("content_block_delta", index=self._num_blocks, delta={"type": kind, name: text})


def _event(name: str, **fields: Any) -> ServerEvent:
    return ServerEvent({"type": name, **fields}, name)
