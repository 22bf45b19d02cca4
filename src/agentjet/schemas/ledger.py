"""LEDGER: decisions that make accounting a function of the log.

Each record is a compare-and-set on its predecessor.
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from agentjet.schemas.field import AsTuple, Closed
from agentjet.schemas.ids import GroupId, RunId
from agentjet.schemas.record import Record
from agentjet.schemas.sampling import Sampling
from agentjet.schemas.task import EpisodeKind


class LearnerStart(Record):
    """A learner takes over its model; fences any predecessor and voids its steps after the base."""

    schema_name = "learner_start"

    run: RunId
    model: str
    incarnation: int
    writer: str = ""
    """Name of the process: two that start in the same instant write different records."""
    base_step: int
    """Steps contained in the checkpoint it starts from; 0 for the initial weights."""
    base_checkpoint: str = ""
    """Version of that checkpoint; empty for the initial weights."""
    cursor: int
    """SAMPLES sequence below which every record is settled in the base."""
    position_digest: str = ""
    """sha256 of the newest record that the base has seen: detects a log that lost its end."""
    config_digest: str
    fold_digest: str
    """Digest of the settled set and pending slots that the base carries."""


class LearnerStep(Record):
    """One optimizer step on one whole batch."""

    schema_name = "learner_step"

    run: RunId
    model: str
    incarnation: int
    step: int
    """Steps taken in the run after this one; the version is `<incarnation>-<step>`."""
    cursor: int
    members: Annotated[tuple[str, ...], AsTuple]
    """Slots whose samples it trained."""
    groups: Annotated[tuple[GroupId, ...], AsTuple]
    """Groups it settled."""
    digest: str
    """sha256 over the trainable weights after the step."""
    is_skipped: bool = False
    """The gradient was not finite: state unchanged, groups settled."""
    metrics: dict[str, float] = Field(default_factory=dict)


class DropReason(StrEnum):
    """Why a group was discarded."""

    CONSTANT = "constant"
    """All rewards are equal and the setting drops such groups."""
    TOO_FEW = "too_few"
    """Fewer than the least number of usable members."""
    UNUSED = "unused"
    """No member called this model."""


class GroupDrop(Record):
    """A group that no step will use; it leaves the admission count at once."""

    schema_name = "group_drop"

    run: RunId
    model: str
    incarnation: int
    group: GroupId
    rank: int
    reason: Annotated[DropReason, Closed]


class CurriculumStart(Record):
    """A curriculum takes over the run."""

    schema_name = "curriculum_start"

    run: RunId
    incarnation: int
    writer: str = ""
    """Name of the process: two that start in the same instant write different records."""
    config_digest: str


class GroupIssue(Record):
    """A group is issued; everything its tickets hold can be derived from this and the data set."""

    schema_name = "group_issue"

    run: RunId
    pool: str
    index: int
    """Running number of the pool's groups; the group is `<pool>-<index>`."""
    kind: Annotated[EpisodeKind, Closed]
    position: int
    """Place in the pool's (shuffled) data set; epoch is `position // len`. -1 for a client's own task."""
    size: int
    seed: int
    models: Annotated[tuple[str, ...], AsTuple]
    ranks: dict[str, int] = Field(default_factory=dict)
    pins: dict[str, str] = Field(default_factory=dict)
    task: dict[str, Any] | None = None
    """Only a client's own task; others come from the data set."""
    client_group: str = ""
    retry_of: str = ""
    """The group with a dead slot whose task and seed this one has again."""
    sampling: Sampling = Field(default_factory=Sampling)
    deadline_seconds: float
    max_offers: int
    is_judged: bool = False
    """By the pool's group judge. Decided at the issue: a changed setting is for later groups."""
    eval_step: int = -1
    """The training step at which an evaluation was due."""


class RunFinish(Record):
    """Nothing more is issued; actors may leave when what is out has settled."""

    schema_name = "run_finish"

    run: RunId
    reason: str
