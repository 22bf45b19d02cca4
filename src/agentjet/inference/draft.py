"""One generation in the making: draws are collected until they are a `Call`.

Invariant: ids and log-probs are kept exactly as drawn, with the version that drew each of them.
"""

import time
from dataclasses import dataclass, field

from agentjet.chat.history import Prompt
from agentjet.chat.parser import assistant_message
from agentjet.chat.reply import ReplyStream
from agentjet.inference.engine import Draw
from agentjet.inference.fence import Permit
from agentjet.schemas.call import Call, FinishReason, InferRequest, Usage
from agentjet.schemas.sampling import Sampling


@dataclass(slots=True)
class Draft:
    """What is known of a call while it is drawn."""

    request: InferRequest
    permit: Permit
    prompt: Prompt
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
    finish: FinishReason | None = None
    stop_string: str | None = None
    num_cached_tokens: int = 0

    def add(self, draw: Draw) -> None:
        """Takes the next draw."""
        version = str(draw.version)
        if draw.ids and (not self.versions or self.versions[-1] != version):
            self.versions.append(version)
            self.version_starts.append(len(self.ids))
        self.ids += draw.ids
        self.logprobs += draw.logprobs
        self.finish = draw.finish_reason or self.finish
        self.stop_string = draw.stop_string or self.stop_string
        self.num_cached_tokens = max(self.num_cached_tokens, draw.num_cached_tokens)

    def call(self) -> Call:
        """The durable record; an unfinished draft is a cancelled call."""
        request = self.request
        finished = self.reply.finish(self.ids, self.stop_string)
        finish = self.finish or FinishReason.CANCELLED
        if finished.calls and finish is FinishReason.STOP:
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
            parent=self.prompt.parent,
            prompt_ids=self.prompt.increment,
            completion_ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            version_starts=tuple(self.version_starts),
            versions=tuple(self.versions),
            sampling=self.sampling,
            messages=request.messages[self.prompt.num_messages_before :],
            tools=request.tools,
            message=assistant_message(finished.content, finished.calls, id_prefix=f"call_{request.call}"),
            finish_reason=finish,
            fork=self.prompt.fork,
            is_drifted=finished.is_drifted,
            usage=Usage(
                prompt_tokens=len(self.prompt.ids),
                completion_tokens=len(self.ids),
                cached_tokens=self.num_cached_tokens,
            ),
            overridden=self.overridden,
            seconds=time.monotonic() - self.started,
        )
