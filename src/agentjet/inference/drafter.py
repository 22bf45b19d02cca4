"""From an admitted request to the draft of its call: prompt, sampling, and the stream that reads the reply.

Invariant: a forced beginning of the reply is prompt and part of what the agent sees, and never sampled. It does not
know the engine or where calls are stored.
"""

import secrets

from agentjet.chat.history import Prompt
from agentjet.chat.reply import ReplyStream
from agentjet.chat.reply_format import PLAIN
from agentjet.chat.template import ChatTemplate
from agentjet.chat.text_history import TextPrompt
from agentjet.errors import BadRequestError
from agentjet.inference.draft import Draft, call_id_prefix
from agentjet.inference.fence import Permit
from agentjet.inference.history import HistoryCache
from agentjet.inference.override import effective_sampling
from agentjet.schemas.call import InferRequest, ToolChoice


class Drafter:
    """Begins the calls of one model; `engine_name` is who draws them."""

    def __init__(
        self,
        model: str,
        template: ChatTemplate,
        histories: HistoryCache,
        *,
        stop_ids: frozenset[int],
        engine_name: str,
    ) -> None:
        self._model = model
        self._template = template
        self._histories = histories
        self._stop_ids = stop_ids
        self._engine_name = engine_name

    async def prompt(self, request: InferRequest, permit: Permit) -> Prompt | TextPrompt:
        """What the call starts from. BadRequestError for a request that can not be rendered."""
        ticket, attempt = permit.ticket.id, permit.attempt
        if request.prompt is not None:
            return await self._histories.text_prompt(ticket, attempt, request.prompt, agent=request.agent)
        return await self._histories.prompt(
            ticket, attempt, request.messages, tools=request.tools, agent=request.agent, forced=self._forced(request)
        )

    async def draft(self, request: InferRequest, permit: Permit, num_calls_before: int) -> Draft:
        """A draft without a token. BadRequestError as `prompt`."""
        prompt = await self.prompt(request, permit)
        sampling, overridden = effective_sampling(
            request.sampling,
            permit.ticket,
            is_played=self._model in permit.ticket.models,
            given=request.given,
            num_calls_before=num_calls_before,
            choice=request.choice,
        )
        return Draft(
            request=request,
            permit=permit,
            prompt=prompt,
            sampling=sampling,
            overridden=overridden,
            engine=self._engine_name,
            generation=secrets.token_hex(8),
            reply=ReplyStream(
                self._template,
                tools=() if request.tool_choice is ToolChoice.NONE else request.tools,
                prompt=prompt.text,
                forced=self._forced(request),
                reply_format=None if request.prompt is None else PLAIN,
                stop_ids=self._stop_ids,
                stop_strings=sampling.stop,
                id_prefix=call_id_prefix(request.call),
            ),
        )

    def _forced(self, request: InferRequest) -> str:
        """How the reply has to begin."""
        if request.tool_choice is not ToolChoice.REQUIRED:
            return ""
        forced = self._template.forced_prefix(request.tool_name or None)
        if forced is None:
            raise BadRequestError(f"tool_choice: model {self._model!r} can not be made to call a tool; use auto")
        return forced
