"""OpenAI's Responses: a reply as output items, and the response object around them.

Invariant: the items hold all of the stored message, so an agent that sends them back continues its exact tokens. A
reply of neither text nor tool calls is an empty text.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agentjet.gateway.conversation import RESPONSE_PREFIX
from agentjet.gateway.dialect import Body
from agentjet.gateway.responses_request import ResponsesRequest
from agentjet.schemas.call import FinishReason, InferReply

_DEFAULTS: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "user": None,
    "background": False,
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "truncation": "disabled",
}


def response(request: ResponsesRequest, call: str, status: str, output: Sequence[Body] = (), **fields: Any) -> Body:
    """A `response` object."""
    return {
        "id": RESPONSE_PREFIX + call,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": list(output),
        "usage": None,
        **_DEFAULTS,
        **request.echo,
        **fields,
    }


def ended(request: ResponsesRequest, reply: InferReply, output: Sequence[Body]) -> Body:
    """The response of a whole reply, completed or cut."""
    is_cut = reply.finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED)
    details = {"reason": "max_output_tokens"} if is_cut else None
    status = "incomplete" if is_cut else "completed"
    return response(request, reply.call, status, output, incomplete_details=details, usage=usage(reply))


def answer(request: ResponsesRequest, reply: InferReply) -> Body:
    """The whole response to a request that is not streamed."""
    message = reply.message
    output: list[Body] = []
    if message.get("reasoning_content"):
        output.append(thinking(reply.call, len(output), message["reasoning_content"]))
    calls = message.get("tool_calls") or []
    if message.get("content") or not calls:
        output.append(text(reply.call, len(output), message.get("content") or ""))
    for one in calls:
        function = one["function"]
        output.append(function_call(reply.call, len(output), one["id"], function["name"], function["arguments"]))
    if reply.finish_reason is FinishReason.LENGTH:
        output[-1]["status"] = "incomplete"
    return ended(request, reply, output)


def usage(reply: InferReply) -> Body:
    """Token counts. Thinking is counted among the output; how much of it is thinking is not known apart."""
    counts = reply.usage
    return {
        "input_tokens": counts.prompt_tokens,
        "input_tokens_details": {"cached_tokens": counts.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": counts.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
    }


def text(call: str, index: int, content: str) -> Body:
    """The item of a text; `index` is its place in the output."""
    part = text_part(content)
    return {
        "id": f"msg_{call}_{index}",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def thinking(call: str, index: int, content: str) -> Body:
    """The item of a thinking; `index` is its place in the output."""
    return {
        "id": f"rs_{call}_{index}",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [thinking_part(content)],
    }


def function_call(call: str, index: int, call_id: str, name: str, arguments: str) -> Body:
    """The item of a tool call; `index` is its place in the output."""
    return {
        "id": f"fc_{call}_{index}",
        "type": "function_call",
        "status": "completed",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
    }


def text_part(content: str) -> Body:
    """The part of a text's item."""
    return {"type": "output_text", "text": content, "annotations": [], "logprobs": []}


def thinking_part(content: str) -> Body:
    """The part of a thinking's item."""
    return {"type": "reasoning_text", "text": content}
