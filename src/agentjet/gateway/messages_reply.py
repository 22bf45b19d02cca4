"""Anthropic's Messages: whole replies, counts and errors."""

from collections.abc import Sequence
from typing import Any

from agentjet.gateway.dialect import Body
from agentjet.gateway.fault import ApiError
from agentjet.gateway.messages_block import blocks_of
from agentjet.gateway.messages_request import parse_count, parse_messages
from agentjet.gateway.messages_shape import error_shape, message_head, stop_fields, usage_shape
from agentjet.gateway.messages_stream import MessageWriter
from agentjet.gateway.request import ModelRequest
from agentjet.schemas.call import InferReply


class Messages:
    """`/v1/messages`."""

    paths = ("/v1/messages",)

    def parse(self, body: Any, *, is_strict: bool) -> ModelRequest:
        """See `parse_messages`."""
        return parse_messages(body, is_strict=is_strict)

    def answer(self, request: ModelRequest, replies: Sequence[InferReply]) -> Body:
        """A `message`."""
        (reply,) = replies
        return {
            **message_head(request.model, reply.call),
            "content": blocks_of(reply.message, reply.call),
            **stop_fields(reply),
            "usage": usage_shape(reply.usage),
        }

    def writer(self, request: ModelRequest, response_id: str) -> MessageWriter:
        """Of a message's events."""
        return MessageWriter(request.model, response_id)

    def error(self, error: ApiError) -> Body:
        """As Anthropic shapes it."""
        return error_shape(error)


class MessageTokens:
    """`/v1/messages/count_tokens`: the true count, of the prompt as inference would build it now."""

    paths = ("/v1/messages/count_tokens",)

    def parse(self, body: Any, *, is_strict: bool) -> ModelRequest:
        """See `parse_count`."""
        return parse_count(body)

    def answer(self, request: ModelRequest, replies: Sequence[InferReply]) -> Body:
        """The count."""
        return {"input_tokens": replies[0].usage.prompt_tokens}

    def writer(self, request: ModelRequest, response_id: str) -> MessageWriter:
        """Never asked for: a count is not streamed."""
        raise NotImplementedError

    def error(self, error: ApiError) -> Body:
        """As Anthropic shapes it."""
        return error_shape(error)
