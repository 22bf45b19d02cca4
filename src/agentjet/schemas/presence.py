"""Presence: heartbeats with a time to live; for liveness and status only."""

from typing import Annotated, Any

from pydantic import Field

from agentjet.schemas.field import AsTuple
from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Part, Record


class Waiting(Part):
    """Something that waits: for what, since when, who could unblock it."""

    what: str
    since: float
    """Bus time, seconds since the epoch."""
    unblocked_by: str = ""


class Presence(Record):
    """An actor is alive."""

    schema_name = "presence"

    run: RunId
    actor: str
    """Kind, for example `learner`."""
    name: str
    """Unique name of the process."""
    models: Annotated[tuple[str, ...], AsTuple] = ()
    host: str
    pid: int
    started: float
    state: str
    """One word: `starting`, `idle`, `busy`, `waiting`, `stopping`."""
    waiting: Annotated[tuple[Waiting, ...], AsTuple] = ()
    problems: Annotated[tuple[str, ...], AsTuple] = ()
    """What needs a person, one sentence each."""
    metrics: dict[str, float] = Field(default_factory=dict)
    info: dict[str, Any] = Field(default_factory=dict)
    """For example the gateway's base_url or an engine's version."""
