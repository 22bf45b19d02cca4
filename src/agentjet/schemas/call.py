"""INFER and CALLS: a question to a model, its deltas and reply, and the durable record."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from agentjet.schemas.field import AsTuple, Closed, Float32Array, Int32Array, TokenIds
from agentjet.schemas.ids import CallId, RunId
from agentjet.schemas.record import Part, Record
from agentjet.schemas.sampling import Sampling


class FinishReason(StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    """An end-of-turn token or a stop string."""
    LENGTH = "length"
    """`max_tokens` or the context."""
    TOOL_CALLS = "tool_calls"
    """As STOP, and the reply holds tool calls."""
    CANCELLED = "cancelled"
    """The caller went away; what was drawn is kept."""


class ForkCause(StrEnum):
    """Why a call's prompt does not continue an earlier call of its episode."""

    NONE = "none"
    """It continues one."""
    FIRST = "first"
    """It opens a conversation."""
    HISTORY_EDITED = "history_edited"
    """The agent changed or dropped earlier messages."""
    TEMPLATE_REWROTE = "template_rewrote"
    """The messages extend, the template's rendering does not."""
    TOOLS_CHANGED = "tools_changed"
    """Another tool list."""
    END_TOKEN = "end_token"
    """A plain prompt shows an earlier reply without its end token; the other tokens are kept."""
    STOP_STRING = "stop_string"
    """The earlier reply ended inside a token at a stop string; the prompt shows the visible text."""


class ToolChoice(StrEnum):
    """Whether the reply calls tools."""

    AUTO = "auto"
    """The model decides."""
    NONE = "none"
    """It does not: what reads like a call stays text. The tools stand in the prompt all the same."""
    REQUIRED = "required"
    """It does: the beginning of a call is part of the prompt, and what follows is drawn freely."""


class InferRequest(Record):
    """INFER: a question to a model. The reply's inbox stands in the header `AJ-Reply`."""

    schema_name = "infer_request"

    run: RunId
    call: CallId
    key: str
    """The caller's signed key; inference checks it."""
    model: str
    agent: str = ""
    """Name of the sub-agent that asks; part of the comparison of histories."""
    messages: Annotated[tuple[dict[str, Any], ...], AsTuple]
    """OpenAI chat messages; none with a plain prompt."""
    prompt: str | None = None
    """A plain prompt, which no template renders."""
    tools: Annotated[tuple[dict[str, Any], ...], AsTuple] = ()
    """OpenAI function tools."""
    tool_choice: Annotated[ToolChoice, Closed] = ToolChoice.AUTO
    tool_name: str = ""
    """The tool that has to be called, with `tool_choice` required; empty for any."""
    sampling: Sampling
    given: Annotated[tuple[str, ...] | None, AsTuple] = None
    """Sampling fields that the caller chose; the ticket's stand for the others. None: the caller chose all."""
    choice: int = 0
    """Index among the choices of one chat completion; those of an evaluation draw from different seeds."""
    stream: bool = False
    num_logprobs: int | None = None
    """Alternatives wanted per token; 0 wants the sampled token's only, None wants none."""
    only_counts: bool = False
    """Only the number of prompt tokens is asked for: nothing is drawn or stored."""
    deadline: float
    """Bus time, seconds since the epoch, after which nobody waits for the reply."""


class Usage(Part):
    """Token counts of a call."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were at hand."""


class ToolCallDelta(Part):
    """A piece of a tool call."""

    index: int
    """Number of the call in the reply, from 0."""
    id: str = ""
    """In the first piece of a call only, as is the name."""
    name: str = ""
    arguments: str = ""
    """A piece of the JSON text of the arguments."""


class InferDelta(Record):
    """A piece of a reply, sent to the inbox as it is drawn.

    The pieces of a generation, joined, are the beginning of the stored message: its `content`, its
    `reasoning_content` and its tool calls. A delta holds what one draw made certain; reasoning comes first in it, then
    text, then tool calls.
    """

    schema_name = "infer_delta"

    call: CallId
    generation: str
    """Names one generation: deltas of two generations are never spliced."""
    index: int
    """Tokens drawn before this delta."""
    text: str = ""
    """A piece of the content."""
    reasoning: str = ""
    """A piece of the thinking, which stands apart from the content."""
    tool_calls: Annotated[tuple[ToolCallDelta, ...], AsTuple] = ()
    usage: Usage | None = None
    """With the first tokens only: the counts so far, which tell those of the prompt."""
    overridden: Annotated[tuple[str, ...], AsTuple] = ()
    """With the first tokens only: as in the reply, for a streamed response names them at its beginning."""


class InferReply(Record):
    """The whole reply, read back from CALLS, or an error."""

    schema_name = "infer_reply"

    call: CallId
    generation: str = ""
    message: dict[str, Any] = Field(default_factory=dict)
    """OpenAI assistant message; thinking stands in its `reasoning_content`."""
    finish_reason: Annotated[FinishReason, Closed] = FinishReason.STOP
    stop_string: str = ""
    """The one that ended it, of those that the caller gave; empty where none did."""
    usage: Usage = Field(default_factory=lambda: Usage(prompt_tokens=0, completion_tokens=0))
    version: str = ""
    """Version of the last token."""
    engine: str = ""
    """Who drew it, and holds the conversation's cache; empty with an error."""
    overridden: Annotated[tuple[str, ...], AsTuple] = ()
    """Sampling fields that were overridden because they break the ratio."""
    completion_ids: TokenIds = ()
    """With `logprobs`: only where log-probs were asked for."""
    logprobs: Float32Array = ()
    tokens: Annotated[tuple[str, ...], AsTuple] = ()
    """Text of each completion token, where log-probs were asked for."""
    error: "CallError | None" = None


class CallError(Part):
    """Why a call has no reply."""

    status: int
    """HTTP status that says it: 400, 401, 403, 404, 409, 429, 503."""
    code: str
    """Short name, for example `context_length_exceeded`."""
    message: str
    param: str | None = None


class Call(Record):
    """CALLS: one generation, as sampled. The prompt is the parent's whole sequence plus `prompt_ids`."""

    schema_name = "call"
    schema_version = (1, 1)

    run: RunId
    call: CallId
    ticket: str
    attempt: int
    model: str
    agent: str = ""
    engine: str
    generation: str
    parent: CallId | None = None
    """Call of the same attempt whose prompt and completion this prompt extends."""
    prompt_ids: TokenIds
    """The increment after the parent's sequence; the whole prompt when there is no parent. Mask 0."""
    completion_ids: TokenIds
    """Tokens exactly as sampled, the end-of-turn token included when it was drawn. Mask 1."""
    logprobs: Float32Array
    """Log-prob of each completion token at `sampling.temperature` over the whole vocabulary."""
    version_starts: Int32Array = (0,)
    """Index into the completion where each of `versions` begins."""
    versions: Annotated[tuple[str, ...], AsTuple]
    """Weights that drew the completion; more than one when an update came in flight."""
    is_mixed: Annotated[tuple[bool, ...], AsTuple] = ()
    """For each of `versions`, whether its tokens were drawn with keys and values of older weights at hand
    (`engine.keep_kv`): no one version gives their log-probs. Empty: none were."""
    sampling: Sampling
    messages: Annotated[tuple[dict[str, Any], ...], AsTuple]
    """The request's messages after those of the parent and its reply."""
    prompt: str | None = None
    """A plain prompt's text after that of the parent and its reply, written out; None where messages were sent."""
    tools: Annotated[tuple[dict[str, Any], ...], AsTuple] = ()
    message: dict[str, Any]
    """The assistant message that the agent received."""
    finish_reason: Annotated[FinishReason, Closed]
    stop_string: str = ""
    """The one that ended the reply; empty where none did."""
    fork: Annotated[ForkCause, Closed] = ForkCause.NONE
    is_drifted: bool = False
    """Encoding the reply's text gives other ids than those sampled; the history keeps the sampled ones."""
    usage: Usage
    overridden: Annotated[tuple[str, ...], AsTuple] = ()
    seconds: float = 0.0
    """From taking the request to the last token."""

    def reply(self, tokens: tuple[str, ...] = (), *, has_logprobs: bool = True) -> InferReply:
        """What its caller gets; `tokens` are the completion's texts, where log-probs were asked for.

        Without `has_logprobs` ids and log-probs are left out: they can be larger than a message.
        """
        return InferReply(
            call=self.call,
            generation=self.generation,
            message=self.message,
            finish_reason=self.finish_reason,
            stop_string=self.stop_string,
            usage=self.usage,
            version=self.versions[-1] if self.versions else "",
            engine=self.engine,
            overridden=self.overridden,
            completion_ids=self.completion_ids if has_logprobs else (),
            logprobs=self.logprobs if has_logprobs else (),
            tokens=tokens,
        )
