"""Replies in the shape of OpenAI's chat completions, whole and in chunks."""

import time
from collections.abc import Sequence
from typing import Any

from agentjet.gateway.chat_request import ChatRequest
from agentjet.schemas.call import FinishReason, InferReply


def completion(request: ChatRequest, replies: Sequence[InferReply]) -> dict[str, Any]:
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

    def __init__(self, request: ChatRequest, response_id: str) -> None:
        self._request = request
        self._base = {
            "id": f"chatcmpl-{response_id}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }

    def text(self, index: int, text: str, *, is_first: bool) -> dict[str, Any]:
        """A piece of a choice's content."""
        role = {"role": "assistant"} if is_first else {}
        return self._chunk({"index": index, "delta": {**role, "content": text}, "finish_reason": None})

    def tool_calls(self, index: int, reply: InferReply) -> dict[str, Any]:
        """All tool calls of a choice."""
        calls = [{"index": number, **call} for number, call in enumerate(reply.message["tool_calls"])]
        return self._chunk({"index": index, "delta": {"tool_calls": calls}, "finish_reason": None})

    def end(self, index: int, reply: InferReply) -> dict[str, Any]:
        """The last chunk of a choice."""
        choice: dict[str, Any] = {"index": index, "delta": {}, "finish_reason": _finish(reply)}
        if self._request.wants_logprobs:
            choice["logprobs"] = logprobs(reply)
        return self._chunk(choice) | {"system_fingerprint": reply.version}

    def usage(self, replies: Sequence[InferReply]) -> dict[str, Any]:
        """The chunk without choices that ends a stream whose caller wants counts."""
        return {**self._base, "choices": [], "usage": usage(replies)}

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._base, "choices": [choice]}


def _finish(reply: InferReply) -> str:
    # A cancelled call has no caller; if one reads it all the same, it reads as cut.
    return FinishReason.LENGTH.value if reply.finish_reason is FinishReason.CANCELLED else reply.finish_reason.value
