"""Batches out of the sample log: the learner's fold, and the samples that it may still need.

The fold holds facts only; this keeps the tensors' source beside it, from a slot's record until its group is trained or
dropped. After a restore the records from the cursor on are read again: the fold knows them already, the samples are
taken. Until that is done no batch comes out, because a restored batch may need them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentjet.accounting.fold import Batch, Drop, LearnerFold
from agentjet.config import AlgorithmSettings, LearnerSettings
from agentjet.schemas.ids import SlotId
from agentjet.schemas.sample import Sample, SlotRecord


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """The groups of one step with their samples."""

    batch: Batch
    samples: Sequence[Sequence[Sample]]
    """By group and member, as in the batch."""


class BatchSource:
    """What a learner, or a replay, trains next.

    Args:
        learner: Batch size and straggler bound.
        algorithm: Which groups are dropped.
        state: `LearnerFold.to_dict` of the base; None begins at the log's start.
    """

    def __init__(
        self, learner: LearnerSettings, algorithm: AlgorithmSettings, state: Mapping[str, Any] | None = None
    ) -> None:
        settings: dict[str, Any] = {
            "batch_groups": learner.batch_groups,
            "straggler_bound": learner.straggler_bound,
            "min_group": algorithm.min_group,
            "drop_constant_groups": algorithm.drop_constant_groups,
            "credits_calls": algorithm.credit == "call",
        }
        self.fold = LearnerFold.from_dict(state, **settings) if state else LearnerFold(**settings)
        self._samples: dict[SlotId, Sample] = {}
        self._read_back_to = self.fold.position if self.fold.cursor <= self.fold.position else 0

    @property
    def start(self) -> int:
        """SAMPLES sequence to read from."""
        return max(self.fold.cursor, 1)

    def take(self, sequence: int, record: SlotRecord) -> None:
        """Take in the log's next record of this model; records that the base has settled change nothing."""
        self.fold.apply(sequence, record)
        if isinstance(record, Sample) and self.fold.is_pending(record.rank):
            self._samples.setdefault(record.slot, record)
        if sequence >= self._read_back_to:
            self._read_back_to = 0

    def pop_drops(self) -> list[Drop]:
        """Groups that no step will use, since the last call."""
        if self._read_back_to:
            return []
        drops = self.fold.pop_drops()
        self._forget({drop.group for drop in drops})
        return drops

    def pop_batch(self) -> SampleBatch | None:
        """The next batch, or None while the log does not hold one."""
        batch = None if self._read_back_to else self.fold.pop_batch()
        if batch is None:
            return None
        samples = [[self._samples[member.slot] for member in group.members] for group in batch.groups]
        self._forget({group.group for group in batch.groups})
        return SampleBatch(batch, samples)

    def waiting(self) -> list[Sample]:
        """Samples that no batch has taken yet."""
        return list(self._samples.values())

    def _forget(self, groups: set[str]) -> None:
        for slot in [slot for slot, sample in self._samples.items() if sample.group in groups]:
            del self._samples[slot]
