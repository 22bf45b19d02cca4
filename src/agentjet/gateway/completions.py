"""OpenAI's text completions: a prompt that no template renders, and the text that follows it."""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentjet.gateway.chat_reply import usage
from agentjet.gateway.completion_field import LIFTED, NEUTRAL, CompletionRequest, num_choices, wants_usage
from agentjet.gateway.dialect import Body, ServerEvent
from agentjet.gateway.fault import ApiError, bad_field, error_body
from agentjet.gateway.field import FieldRules, object_of, refuse_bending, sampling_of, stop_strings, typed
from agentjet.schemas.call import FinishReason, InferDelta, InferReply
from agentjet.schemas.sampling import Sampling

DEFAULT_MAX_TOKENS = 16
"""As in OpenAI's API: the pool's own is that of whole replies."""
_RULES = FieldRules(
    honoured=frozenset(
        [
            "model",
            "prompt",
            "temperature",
            "top_p",
            "top_k",
            "max_tokens",
            "stop",
            "seed",
            "n",
            "stream",
            "stream_options",
            "logprobs",
        ]
    ),
    harmless=frozenset(["user"]),
    neutral={
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        **NEUTRAL,
    },
    lifted=LIFTED,
    unsupported={
        "best_of": "use n, and choose among the choices",
        "echo": "the prompt is at hand; put it in front",
        "suffix": "only what follows a prompt is written",
    },
)


def parse_completions(body: Any, *, is_strict: bool = False) -> CompletionRequest:
    """The request in a decoded JSON body.

    Raises ApiError (400) that names the field.
    """
    fields = object_of(body)
    lifted = _RULES.check(fields)
    sampling, given = _sampling(fields)
    if is_strict:
        refuse_bending(sampling, lifted)
    if typed(fields, "logprobs", int, default=0):
        why = "alternatives are not supported; 0 gives the log-probs of the sampled tokens"
        raise bad_field("logprobs", why, code="unsupported_parameter")
    is_streamed = typed(fields, "stream", bool, default=False)
    return CompletionRequest(
        model=typed(fields, "model", str, required=True),
        messages=(),
        prompt=_prompt(fields),
        sampling=sampling,
        given=given,
        lifted=lifted,
        num_choices=num_choices(fields),
        is_streamed=is_streamed,
        wants_usage=wants_usage(fields, is_streamed=is_streamed),
        wants_logprobs="logprobs" in fields,
    )


def _sampling(fields: Mapping[str, Any]) -> tuple[Sampling, tuple[str, ...]]:
    values = {name: fields[name] for name in ("temperature", "top_p", "top_k", "seed") if name in fields}
    values["max_tokens"] = fields.get("max_tokens", DEFAULT_MAX_TOKENS)
    if "stop" in fields:
        values["stop"] = stop_strings(fields["stop"])
    return sampling_of(values), tuple(values)


def _prompt(fields: Mapping[str, Any]) -> str:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str) or not prompt:
        why = "has to be one text that is not empty; send several prompts one by one, and token ids as their text"
        raise bad_field("prompt", why)
    return prompt


class Completions:
    """`/v1/completions`."""

    paths = ("/v1/completions",)

    def parse(self, body: Any, *, is_strict: bool) -> CompletionRequest:
        """See `parse_completions`."""
        return parse_completions(body, is_strict=is_strict)

    def answer(self, request: CompletionRequest, replies: Sequence[InferReply]) -> Body:
        """A `text_completion` with one choice for each reply."""
        choices = [
            _choice(request, index, reply.message.get("content") or "", reply) for index, reply in enumerate(replies)
        ]
        head = _head(request, replies[0].call)
        return head | {"system_fingerprint": replies[-1].version, "choices": choices, "usage": usage(replies)}

    def writer(self, request: CompletionRequest, response_id: str) -> "TextWriter":
        """Of pieces of the text."""
        return TextWriter(request, response_id)

    def error(self, error: ApiError) -> Body:
        """As OpenAI shapes it."""
        return error_body(error)


class TextWriter:
    """The events of one streamed response."""

    def __init__(self, request: CompletionRequest, response_id: str) -> None:
        self._request = request
        self._base = _head(request, response_id)

    def start(self) -> Iterator[ServerEvent]:
        """Nothing."""
        yield from ()

    def delta(self, index: int, delta: InferDelta) -> Iterator[ServerEvent]:
        """A piece of the text; an empty one at the start tells that there is no early error."""
        if delta.text or delta.usage:
            yield self._event([_choice(self._request, index, delta.text, None)])

    def end(self, index: int, reply: InferReply) -> Iterator[ServerEvent]:
        """Why a choice ended."""
        yield self._event([_choice(self._request, index, "", reply)], system_fingerprint=reply.version)

    def finish(self, replies: Sequence[InferReply]) -> Iterator[ServerEvent]:
        """The counts, if the caller wants them, and the end mark."""
        if self._request.wants_usage:
            yield self._event([], usage=usage(replies))
        yield ServerEvent("[DONE]")

    def fail(self, error: ApiError) -> Iterator[ServerEvent]:
        """The error's body."""
        yield ServerEvent(error_body(error))

    def _event(self, choices: list[Body], **fields: Any) -> ServerEvent:
        return ServerEvent(self._base | {"choices": choices} | fields)


def _head(request: CompletionRequest, response_id: str) -> Body:
    return {
        "id": f"cmpl-{response_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": request.model,
    }


def _choice(request: CompletionRequest, index: int, text: str, reply: InferReply | None) -> Body:
    """Whole, the last of a stream, or with no reply yet one before it."""
    is_stop = reply is not None and reply.finish_reason is FinishReason.STOP
    finish = None if reply is None else "stop" if is_stop else "length"
    shown = _logprobs(reply) if reply is not None and request.wants_logprobs else None
    return {"index": index, "text": text, "finish_reason": finish, "logprobs": shown}


def _logprobs(reply: InferReply) -> Body:
    """Of the sampled tokens; `text_offset` counts from the start of the reply."""
    texts = reply.tokens or tuple(f"token_id:{token}" for token in reply.completion_ids)
    offsets = list(itertools.accumulate(map(len, texts), initial=0))[:-1]
    return {
        "tokens": list(texts),
        "token_logprobs": list(reply.logprobs),
        "top_logprobs": None,
        "text_offset": offsets,
    }
