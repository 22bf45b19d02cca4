"""One generation in the making: draws are collected until they are a `Call`.

Invariant: ids and log-probs are kept exactly as drawn, with the version that drew each of them.
"""

import time
from dataclasses import dataclass, field

from agentjet.chat.history import Prompt
from agentjet.chat.reply import ReplyDelta, ReplyStream
from agentjet.chat.text_history import TextPrompt
from agentjet.inference.engine import Draw
from agentjet.inference.fence import Permit
from agentjet.schemas.call import Call, FinishReason, InferDelta, InferRequest, Usage
from agentjet.schemas.ids import CallId
from agentjet.schemas.sampling import Sampling


@dataclass(slots=True)
class Draft:
    """What is known of a call while it is drawn."""

    request: InferRequest
    permit: Permit
    prompt: Prompt | TextPrompt
    sampling: Sampling
    overridden: tuple[str, ...]
    engine: str
    generation: str
    reply: ReplyStream
    started: float = field(default_factory=time.monotonic)
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[str] = field(default_factory=list[str])
    version_starts: list[int] = field(default_factory=list[int])
    is_mixed: list[bool] = field(default_factory=list[bool])
    finish: FinishReason | None = None
    stop_string: str | None = None
    num_cached_tokens: int = 0

    def add(self, draw: Draw) -> None:
        """Takes the next draw."""
        version = str(draw.version)
        if draw.ids and (not self.versions or (self.versions[-1], self.is_mixed[-1]) != (version, draw.is_mixed)):
            self.versions.append(version)
            self.version_starts.append(len(self.ids))
            self.is_mixed.append(draw.is_mixed)
        self.ids += draw.ids
        self.logprobs += draw.logprobs
        self.finish = draw.finish_reason or self.finish
        self.stop_string = draw.stop_string or self.stop_string
        self.num_cached_tokens = max(self.num_cached_tokens, draw.num_cached_tokens)

    def deltas(self, draw: Draw) -> list[InferDelta]:
        """Takes the next draw, and makes what a caller that streams is told of it.

        The first one counts the prompt and names what was overridden.
        """
        index = len(self.ids)
        self.add(draw)
        if not self.request.stream:
            return []
        pieces = self.reply.feed(draw.ids) or ([] if index else [ReplyDelta()])
        return [
            InferDelta(
                call=self.request.call,
                generation=self.generation,
                index=index,
                text=piece.text,
                reasoning=piece.reasoning,
                tool_calls=piece.tool_calls,
                usage=self.usage() if index == number == 0 else None,
                overridden=self.overridden if index == number == 0 else (),
            )
            for number, piece in enumerate(pieces)
        ]

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=len(self.prompt.ids),
            completion_tokens=len(self.ids),
            cached_tokens=self.num_cached_tokens,
        )

    def call(self) -> Call:
        """The durable record; an unfinished draft is a cancelled call."""
        request, prompt = self.request, self.prompt
        is_text = isinstance(prompt, TextPrompt)
        finished = self.reply.finish(self.ids, self.stop_string)
        finish = self.finish or FinishReason.CANCELLED
        if finished.reply.calls and finish is FinishReason.STOP:
            finish = FinishReason.TOOL_CALLS
        return Call(
            run=request.run,
            call=request.call,
            ticket=self.permit.ticket.id,
            attempt=self.permit.attempt,
            model=request.model,
            agent=request.agent,
            engine=self.engine,
            generation=self.generation,
            parent=prompt.parent,
            prompt_ids=prompt.increment,
            completion_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            version_starts=tuple(self.version_starts),
            versions=tuple(self.versions),
            is_mixed=tuple(self.is_mixed) if any(self.is_mixed) else (),
            sampling=self.sampling,
            messages=() if is_text else request.messages[prompt.num_messages_before :],
            prompt=prompt.text if is_text else None,
            tools=request.tools,
            message=finished.reply.message(id_prefix=call_id_prefix(request.call)),
            finish_reason=finish,
            stop_string=self.stop_string or "",
            fork=prompt.fork,
            is_drifted=finished.is_drifted,
            usage=self.usage(),
            overridden=self.overridden,
            seconds=time.monotonic() - self.started,
        )


def call_id_prefix(call: CallId) -> str:
    """Of the ids of a reply's tool calls: they differ in all replies of a run."""
    return f"call_{call}"
