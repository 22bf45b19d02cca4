"""TASKS: a ticket to play one episode."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from agentjet.schemas.field import AsTuple, Closed
from agentjet.schemas.ids import GroupId, RunId, SlotId, TicketId, TicketName
from agentjet.schemas.record import Record
from agentjet.schemas.sampling import Sampling


class EpisodeKind(StrEnum):
    """What an episode is played for."""

    TRAIN = "train"
    """Its samples reach the learners of its models."""
    EVAL = "eval"
    """It settles at its score and reaches no learner."""


class Ticket(Record):
    """One offer of one slot. Written by the curriculum only, first to its ledger (as a range), then to TASKS."""

    schema_name = "ticket"

    run: RunId
    pool: str
    group: GroupId
    member: Annotated[int, Field(ge=0)]
    offer: Annotated[int, Field(ge=0)] = 0
    group_size: Annotated[int, Field(ge=1)]
    max_offers: Annotated[int, Field(ge=1)] = 3
    """Offers of a slot before it is dead."""
    kind: Annotated[EpisodeKind, Closed] = EpisodeKind.TRAIN
    models: Annotated[tuple[str, ...], AsTuple]
    """Models that this episode trains (or, in an evaluation, plays)."""
    ranks: dict[str, int] = Field(default_factory=dict)
    """The group's issue rank for each trained model; empty in an evaluation."""
    task: dict[str, Any] = Field(default_factory=dict)
    """The task instance, as the pool's data set gives it. Left out of the copies in later records."""
    seed: int
    """Same for all members of the group."""
    deadline_seconds: Annotated[float, Field(gt=0)]
    """From the claim (or, unclaimed, from the issue) to the episode's end."""
    sampling: Sampling = Field(default_factory=Sampling)
    """Defaults of the pool; temperature is binding on training calls."""
    pins: dict[str, str] = Field(default_factory=dict)
    """Evaluation: the version of each model that has to answer."""
    is_judged: bool = False
    """A group judge scores the group's completed members together, once every slot has settled."""

    @property
    def id(self) -> TicketId:
        """`<group>.<member>.<offer>`."""
        return TicketName(self.group, self.member, self.offer).id

    @property
    def slot(self) -> SlotId:
        """`<group>.<member>`."""
        return TicketName(self.group, self.member, self.offer).slot

    @property
    def is_last_offer(self) -> bool:
        """Whether a failure of this offer leaves the slot dead."""
        return self.offer + 1 >= self.max_offers

    def without_task(self) -> "Ticket":
        """The copy that later records carry."""
        return self.model_copy(update={"task": {}})
