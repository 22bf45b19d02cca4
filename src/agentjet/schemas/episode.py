"""EPISODES: the end of an episode. The first stored end of a ticket wins for ever."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from agentjet.schemas.field import AsTuple, Closed
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Part, Record
from agentjet.schemas.task import Ticket


class EndStatus(StrEnum):
    """How an episode ended, before it is scored."""

    COMPLETED = "completed"
    """The agent's code returned; it can be scored."""
    FAILED = "failed"
    """Infrastructure failed (agent crash, engine, tool server); it is re-offered, never scored 0."""
    ABORTED = "aborted"
    """The client gave it up; it is re-offered."""
    DEAD = "dead"
    """Its deadline passed, or its offers are used up; written by the curriculum."""


class Fault(Part):
    """What went wrong, as data."""

    kind: str
    """Name of the error, for example `EngineError` or `no_model_calls`."""
    message: str
    """One sentence, at most 2,000 characters."""


CONTEXT = "context"
"""Stop reason of an episode in which a prompt left no room in a model's context."""
PROMPT_TOO_LONG = "prompt_too_long"
"""Kind of the fault of an episode whose very first prompt left no room in a model's context: no offer can help it."""

DEADLINE = "deadline"
"""Kind of the fault of an episode that the curriculum ended, because nobody did in time."""


class Episode(Record):
    """An episode's end."""

    schema_name = "episode"

    run: RunId
    ticket: Ticket
    """With its task, for the reward functions."""
    attempt: int
    """The claim that ended it; 0 when nobody had claimed it."""
    status: Annotated[EndStatus, Closed]
    calls: dict[str, Annotated[tuple[str, ...], AsTuple]] = Field(default_factory=dict)
    """Answered calls for each model, in order: exactly these are merged."""
    reward: float | None = None
    """The client's own score, when it gives one."""
    call_rewards: dict[str, float] = Field(default_factory=dict)
    """The client's own rewards of single calls; all calls of a model or none."""
    result: Any = None
    """What the agent returned, for the reward functions: any JSON value."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Numbers of the client, averaged into the run's metrics."""
    transcript: Annotated[tuple[dict[str, Any], ...], AsTuple] = ()
    """What the agent chose to log for the reader; not used for training."""
    stop_reason: str = ""
    """For example "context"."""
    fault: Fault | None = None
    agent_digest: str = ""
    """sha256 of the agent's code file."""
    worker: str = ""
    seconds: float = 0.0
    """From claim to end by the player's monotonic clock."""


class EndReply(Record):
    """What happened to an end that a client handed in."""

    schema_name = "end_reply"

    ticket: str
    accepted: bool
    """True for the stored end's own attempt, however often it asks."""
    reason: str = ""
