"""SAMPLES: one token prefix tree per episode and model, or the slot's tombstone.

The tree is a list of segments; segment 0 has no parent. A *term* is one sampled token: it stands at `offset` of
`segment`, so its token is `segments[segment].ids[offset]` and it is predicted at the position before it on its path.
Two independent identical replies share segments and stay two terms.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from agentjet.schemas.field import AsTuple, Closed, Float32Array, Int32Array, TokenIds
from agentjet.schemas.ids import GroupId, RunId, SlotId, slot_id
from agentjet.schemas.record import Part, Record


class Segment(Part):
    """A run of tokens without a branch."""

    parent: int
    """Index of the segment it continues, lower than its own; -1 for a root."""
    ids: TokenIds


class SampledCall(Part):
    """What the loss needs to know of a call; its terms follow those of the call before it."""

    call: str
    agent: str = ""
    engine: str = ""
    """Who drew it; empty in samples of before engines were named."""
    num_terms: Annotated[int, Field(ge=0)]
    temperature: float = 1.0
    versions: Annotated[tuple[str, ...], AsTuple]
    version_starts: Int32Array = (0,)
    is_mixed: Annotated[tuple[bool, ...], AsTuple] = ()
    """As in the call: tokens that are not compared with the learner's log-probs."""
    is_truncated: bool = False
    """The reply ended by length."""
    is_trained: bool = True
    """False for calls whose log-probs have no valid ratio: their tokens are context only."""
    reward: float | None = None
    """Its own, where single calls have rewards."""


class MergeReport(Part):
    """What merging saved, and why the episode forked."""

    num_calls: int
    num_branches: int
    """Leaves of the tree."""
    num_row_tokens: int
    """Tokens if each call were a row of its own."""
    num_tree_tokens: int
    """Unique tokens in the tree."""
    forks: dict[str, int] = Field(default_factory=dict)
    """Calls by fork cause, `none` left out."""
    num_drifted: int = 0

    @property
    def compression_ratio(self) -> float:
        """Calls for each branch; 1 where no call continues another."""
        return self.num_calls / max(1, self.num_branches)


class SlotRecord(Record):
    """What every record of a slot carries."""

    run: RunId
    model: str
    ticket: str
    group: GroupId
    member: int
    rank: int
    """The group's issue rank for this model."""
    group_size: int

    @property
    def slot(self) -> SlotId:
        """`<group>.<member>`."""
        return slot_id(self.group, self.member)


class Sample(SlotRecord):
    """A scored episode's tree for one model."""

    schema_name = "sample"
    schema_version = (1, 1)

    reward: float
    agent_rewards: dict[str, float] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    segments: Annotated[tuple[Segment, ...], AsTuple]
    calls: Annotated[tuple[SampledCall, ...], AsTuple]
    term_segment: Int32Array
    """[terms] segment of each term."""
    term_offset: Int32Array
    """[terms] place within its segment."""
    term_logprob: Float32Array
    """[terms] the sampler's log-prob."""
    report: MergeReport


class TombstoneReason(StrEnum):
    """Why a slot has no sample."""

    DEAD = "dead"
    """Its last offer failed or its deadline passed."""
    UNUSED = "unused"
    """The episode was scored but never called this model."""
    POISON = "poison"
    """Its record crashed the merger every time."""


class Tombstone(SlotRecord):
    """A slot that is settled without a sample."""

    schema_name = "tombstone"

    reason: Annotated[TombstoneReason, Closed]
    detail: str = ""
