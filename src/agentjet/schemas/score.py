"""SCORES: what an ended episode was worth, or that it is worth nothing to learn from."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from agentjet.schemas.episode import Fault
from agentjet.schemas.field import AsTuple, Closed
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Record
from agentjet.schemas.task import Ticket


class Outcome(StrEnum):
    """How a ticket settled."""

    SCORED = "scored"
    """It has a reward."""
    INVALID = "invalid"
    """Infrastructure or judge failed: re-offered, out of mean, std, metrics and loss; never reward 0."""
    ABORTED = "aborted"
    """The client gave it up: re-offered."""
    DEAD = "dead"
    """Past its deadline or its offers: the slot gets a tombstone."""


class Score(Record):
    """A ticket's outcome."""

    schema_name = "score"

    run: RunId
    ticket: Ticket
    """Without its task."""
    attempt: int
    outcome: Annotated[Outcome, Closed]
    reward: float | None = None
    """Present exactly when `outcome` is scored."""
    components: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward."""
    agent_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards of single agents, where the reward function gives them; others take `reward`."""
    call_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards of single calls, the reward function's or else the client's; all calls of a model or none."""
    metrics: dict[str, float] = Field(default_factory=dict)
    calls: dict[str, Annotated[tuple[str, ...], AsTuple]] = Field(default_factory=dict)
    """As in the episode: exactly these are merged."""
    fault: Fault | None = None
    judged_by: str = ""
    """"client", the function's name, or the judgement's judge."""

    @property
    def closes_slot(self) -> bool:
        """Whether the slot is settled: scored, dead, or failed at its last offer."""
        return self.outcome in (Outcome.SCORED, Outcome.DEAD) or self.ticket.is_last_offer
