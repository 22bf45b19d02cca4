"""What an agent asks of a model, whichever dialect it speaks."""

from dataclasses import dataclass
from typing import Any

from agentjet.schemas.call import ToolChoice
from agentjet.schemas.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A checked request; each dialect adds what it needs for its answer."""

    model: str
    messages: tuple[dict[str, Any], ...]
    """OpenAI chat messages."""
    prompt: str | None = None
    """A plain prompt in place of messages, which no template renders."""
    num_instructions: int = 0
    """Messages at the front that no later request inherits."""
    previous: str = ""
    """Id of an earlier response: its conversation stands before the messages, behind the instructions."""
    is_remembered: bool = False
    """A later request may name this one's response as its `previous`."""
    tools: tuple[dict[str, Any], ...] = ()
    """OpenAI function tools."""
    tool_choice: ToolChoice = ToolChoice.AUTO
    tool_name: str = ""
    """The tool that has to be called, with `ToolChoice.REQUIRED`; empty for any."""
    sampling: Sampling
    given: tuple[str, ...]
    """Fields of `sampling` that the body sets."""
    lifted: tuple[str, ...] = ()
    """Fields that were set and do not take effect: they break the ratio, or the model has no switch for them."""
    num_choices: int = 1
    is_streamed: bool = False
    wants_logprobs: bool = False
    only_counts: bool = False
    """Only the number of prompt tokens is asked for: no reply is drawn, so there is none to train on."""
