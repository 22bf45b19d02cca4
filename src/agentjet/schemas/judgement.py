"""JUDGEMENTS: a group judge's single verdict on all members of a group."""

from typing import Annotated

from pydantic import Field

from agentjet.schemas.field import AsTuple
from agentjet.schemas.ids import GroupId, RunId, TicketId
from agentjet.schemas.record import Part, Record


class Verdict(Part):
    """One member's part: all that a score says beyond what the member's stored end says."""

    ticket: TicketId
    reward: float | None = None
    """None when this member could not be judged: it is dead, as a group is judged only once."""
    components: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward."""
    agent_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards of single agents; others take `reward`."""
    call_rewards: dict[str, float] = Field(default_factory=dict)
    """Rewards of single calls; empty: the client's own stand."""
    metrics: dict[str, float] = Field(default_factory=dict)
    reason: str = ""
    """The judge's own words, or why there is no reward; at most 500 characters."""


class Judgement(Record):
    """Scores of a group derive only from this and from the members' stored ends, never from another answer."""

    schema_name = "judgement"

    run: RunId
    group: GroupId
    judge: str
    """Name of the function."""
    verdicts: Annotated[tuple[Verdict, ...], AsTuple]
    """One for each member whose episode was completed."""
