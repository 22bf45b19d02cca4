"""JUDGEMENTS: a group judge's single verdict on all members of a group."""

from typing import Annotated

from agentjet.schemas.field import AsTuple
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.record import Part, Record


class Verdict(Part):
    """One member's part."""

    ticket: str
    reward: float | None = None
    """None when the judge could not score this member: it is invalid."""
    reason: str = ""


class Judgement(Record):
    """Scores of a group derive only from this."""

    schema_name = "judgement"

    run: RunId
    group: GroupId
    judge: str
    verdicts: Annotated[tuple[Verdict, ...], AsTuple]
