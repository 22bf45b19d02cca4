"""EVENTS: what happened, for people and dashboards; nothing depends on it."""

from typing import Any

from pydantic import Field

from agentjet.schemas.ids import RunId
from agentjet.schemas.record import Record


class Event(Record):
    """One thing that happened."""

    schema_name = "event"

    run: RunId
    actor: str
    kind: str
    level: str = "info"
    data: dict[str, Any] = Field(default_factory=dict)
