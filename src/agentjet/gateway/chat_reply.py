"""OpenAI's Chat Completions: replies whole and in chunks."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from agentjet.gateway.chat_request import parse_chat
from agentjet.gateway.completion_field import CompletionRequest
from agentjet.gateway.dialect import Body, ServerEvent
from agentjet.gateway.fault import ApiError, error_body
from agentjet.schemas.call import FinishReason, InferDelta, InferReply, ToolCallDelta


def completion(request: CompletionRequest, replies: Sequence[InferReply]) -> dict[str, Any]:
    """A `chat.completion` with one choice for each reply."""
    return {
        "id": f"chatcmpl-{replies[0].call}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "system_fingerprint": replies[-1].version,
        "choices": [
            {
                "index": index,
                "message": {"refusal": None, **reply.message},
                "finish_reason": _finish(reply),
                "logprobs": logprobs(reply) if request.wants_logprobs else None,
            }
            for index, reply in enumerate(replies)
        ],
        "usage": usage(replies),
    }


def usage(replies: Sequence[InferReply]) -> dict[str, Any]:
    """Token counts; the prompt of several choices counts once."""
    prompt = max(reply.usage.prompt_tokens for reply in replies)
    drawn = sum(reply.usage.completion_tokens for reply in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": drawn,
        "total_tokens": prompt + drawn,
        "prompt_tokens_details": {"cached_tokens": max(reply.usage.cached_tokens for reply in replies)},
    }


def logprobs(reply: InferReply) -> dict[str, Any]:
    """Log-probs of the sampled tokens; a token whose text is not at hand shows its id."""
    texts = reply.tokens or tuple(f"token_id:{token}" for token in reply.completion_ids)
    content = [
        {
            "token": text,
            "logprob": logprob,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "top_logprobs": [],
        }
        for text, logprob in zip(texts, reply.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


class ChunkWriter:
    """The `chat.completion.chunk`s of one streamed response."""

    def __init__(self, request: CompletionRequest, response_id: str) -> None:
        self._request = request
        self._opened: set[int] = set()
        self._base = {
            "id": f"chatcmpl-{response_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

    def start(self) -> Iterator[ServerEvent]:
        """Nothing: a choice's first chunk names its role."""
        yield from ()

    def delta(self, index: int, delta: InferDelta) -> Iterator[ServerEvent]:
        """One chunk with all that is new."""
        fields: dict[str, Any] = {}
        if index not in self._opened:
            self._opened.add(index)
            fields = {"role": "assistant", "content": ""}
        if delta.text:
            fields["content"] = delta.text
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            fields["tool_calls"] = [_tool_piece(piece) for piece in delta.tool_calls]
        if fields:
            yield self._chunk({"index": index, "delta": fields, "finish_reason": None})

    def end(self, index: int, reply: InferReply) -> Iterator[ServerEvent]:
        """The last chunk of a choice."""
        choice: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": _finish(reply)}
        if self._request.wants_logprobs:
            choice["logprobs"] = logprobs(reply)
        yield self._chunk(choice, system_fingerprint=reply.version)

    def finish(self, replies: Sequence[InferReply]) -> Iterator[ServerEvent]:
        """A chunk without choices, if the caller wants counts, and the end mark."""
        if self._request.wants_usage:
            yield ServerEvent({**self._base, "choices": [], "usage": usage(replies)})
        yield ServerEvent("[DONE]")

    def fail(self, error: ApiError) -> Iterator[ServerEvent]:
        """The error's body in place of a chunk."""
        yield ServerEvent(error_body(error))

    def _chunk(self, choice: dict[str, Any], **fields: str) -> ServerEvent:
        return ServerEvent({**self._base, "choices": [choice], **fields})


def _tool_piece(piece: ToolCallDelta) -> dict[str, Any]:
    if not piece.name:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


class ChatCompletions:
    """`/v1/chat/completions`."""

    paths = ("/v1/chat/completions",)

    def parse(self, body: Any, *, is_strict: bool) -> CompletionRequest:
        """See `parse_chat`."""
        return parse_chat(body, is_strict=is_strict)

    def answer(self, request: CompletionRequest, replies: Sequence[InferReply]) -> Body:
        """See `completion`."""
        return completion(request, replies)

    def writer(self, request: CompletionRequest, response_id: str) -> ChunkWriter:
        """Of chunks."""
        return ChunkWriter(request, response_id)

    def error(self, error: ApiError) -> Body:
        """As OpenAI shapes it."""
        return error_body(error)


def _finish(reply: InferReply) -> str:
    # A cancelled call has no caller; if one reads it all the same, it reads as cut.
    return FinishReason.LENGTH.value if reply.finish_reason is FinishReason.CANCELLED else reply.finish_reason.value
