"""The learner's fold over SAMPLES: which groups make which batch is a function of the log and the settings alone.

The rule. A group is *complete* when each of its slots has a record. A complete group is dropped at once when it trains
nobody; otherwise it is usable. The *effective rank* of a group is its rank less the dropped ranks below it. Batch k
(k = 1, 2, ...; it becomes step k) is formed at the earliest log position where `batch_groups` usable groups that no
earlier batch took are complete and every group of effective rank below (k - w) x batch_groups is complete; it takes
the lowest ranks. With w = 0 groups train in the order of issue; a larger w lets slow groups be overtaken by up to w
batches (`agentjet.accounting.admission` derives the bound on staleness).

Invariants:

- Feeding records one by one or in chunks, or restoring any state and feeding on, gives the same batches and drops.
- A slot counts once: a record of a known slot changes nothing, at whatever sequence it stands.
- `cursor` is the lowest sequence of a record that is in no popped batch and no dropped group.

Batches are formed as records arrive, however late they are popped. The state to keep with step k is `to_dict()` after
`pop_batch` gave batch k and before it gives batch k + 1. Drops popped since then come out again after a restore,
because the ledger voids drops recorded after step k; recording one twice is harmless.

It holds facts of slots, never tensors; the learner reads samples again by sequence.
"""

import hashlib
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from agentjet.accounting.group import FoldGroup
from agentjet.accounting.interval import IntervalSet
from agentjet.errors import RecordError
from agentjet.schemas.ids import GroupId, SlotId
from agentjet.schemas.ledger import DropReason
from agentjet.schemas.sample import SlotRecord

STATE_VERSION = 1


@dataclass(frozen=True, slots=True)
class Drop:
    """A group that no batch will take; becomes a `GroupDrop`."""

    group: GroupId
    rank: int
    reason: DropReason
    position: int
    """SAMPLES sequence at which it was dropped."""


@dataclass(frozen=True, slots=True)
class BatchMember:
    """A usable sample of a batch."""

    slot: SlotId
    sequence: int
    """Of the sample in SAMPLES."""
    reward: float


@dataclass(frozen=True, slots=True)
class BatchGroup:
    """A group of a batch with its usable members, by member."""

    group: GroupId
    rank: int
    members: tuple[BatchMember, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one optimizer step, by rank."""

    step: int
    """The step it becomes."""
    groups: tuple[BatchGroup, ...]
    cursor: int
    """Lowest sequence of a record that is unsettled once this batch is trained."""
    position: int
    """SAMPLES sequence at which it was formed."""

    @property
    def members(self) -> tuple[BatchMember, ...]:
        """All its samples, group by group."""
        return tuple(member for group in self.groups for member in group.members)


@dataclass(slots=True)
class _Formed:
    """A batch that waits to be popped."""

    groups: list[FoldGroup]
    cursor: int
    position: int


class LearnerFold:
    """The fold of one model.

    Example:
        fold = LearnerFold(batch_groups=4, straggler_bound=0, min_group=2)
        fold.apply(sequence, record)
        drops, batch = fold.pop_drops(), fold.pop_batch()

    Args:
        batch_groups: Groups of a batch.
        straggler_bound: w of the rule.
        min_group: Fewest usable members of a group that trains.
        drop_constant_groups: Drop groups whose rewards are all equal.
        credits_calls: These are the rewards of single calls, in groups whose every call has one.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        straggler_bound: int = 0,
        min_group: int = 2,
        drop_constant_groups: bool = False,
        credits_calls: bool = False,
    ) -> None:
        self._batch_groups, self._straggler_bound = batch_groups, straggler_bound
        self._min_group, self._drop_constant = min_group, drop_constant_groups
        self._credits_calls = credits_calls
        self._position = 0
        self._num_popped = 0
        self._num_taken = 0
        self._complete = IntervalSet()
        self._dropped = IntervalSet()
        self._open: dict[int, FoldGroup] = {}
        self._ready: dict[int, FoldGroup] = {}
        self._formed: deque[_Formed] = deque()
        self._drops: list[Drop] = []
        self._recent_drops: list[Drop] = []
        self._num_issued: int | None = None

    def apply(self, sequence: int, record: SlotRecord) -> None:
        """Take in a sample or tombstone; known slots are ignored.

        Raises:
            RecordError: The record contradicts the log so far.
        """
        if record.rank in self._complete:
            return
        group = self._open.get(record.rank) or FoldGroup(record.group, record.rank, record.group_size)
        is_new = group.take(sequence, record)
        if is_new and sequence <= self._position:
            raise RecordError(
                f"SAMPLES {sequence}: slot {record.slot} is new, but the log was read up to {self._position} already"
            )
        if not is_new:
            return
        self._position = sequence
        if self._num_issued is not None and record.rank >= self._num_issued:
            # The run goes on after all: a curriculum has reopened it.
            self._num_issued = None
        self._open[record.rank] = group
        if group.is_complete:
            self._settle(self._open.pop(record.rank))

    def _settle(self, group: FoldGroup) -> None:
        self._complete.add(group.rank)
        reason = group.drop_reason(
            self._min_group, drop_constant=self._drop_constant, credits_calls=self._credits_calls
        )
        if reason is None:
            self._ready[group.rank] = group
        else:
            self._dropped.add(group.rank)
            self._drops.append(Drop(group.group, group.rank, reason, self._position))
        self._form()

    def finish(self, num_issued: int) -> None:
        """The run issues no more than `num_issued` groups to this model: what is left over may be a partial batch.

        A record of a higher rank takes that back.
        """
        self._num_issued = num_issued
        self._form()

    def _form(self) -> None:
        while self._is_due(self._batch_groups):
            self._take(self._batch_groups)
        is_all_there = self._num_issued is not None and self._complete.first_gap >= self._num_issued
        if is_all_there and self._ready:
            self._take(len(self._ready))

    def _is_due(self, size: int) -> bool:
        frontier = self._complete.first_gap
        num_settled = frontier - self._dropped.count_below(frontier)
        # (k - w) x batch, with the groups taken so far in place of (k - 1) x batch: the batch size may have changed.
        return len(self._ready) >= size and num_settled >= self._num_taken + (1 - self._straggler_bound) * size

    def _take(self, size: int) -> None:
        groups = [self._ready.pop(rank) for rank in sorted(self._ready)[:size]]
        self._num_taken += size
        self._formed.append(_Formed(groups, self._lowest_pending(), self._position))

    def _lowest_pending(self) -> int:
        pending = (*self._open.values(), *self._ready.values())
        return min((group.first_sequence for group in pending), default=self._position + 1)

    def pop_drops(self) -> list[Drop]:
        """Groups dropped since the last call, in log order: to be recorded before the next batch is popped."""
        drops, self._drops = self._drops, []
        self._recent_drops += drops
        return drops

    def pop_batch(self) -> Batch | None:
        """The next batch, or None while the log does not hold one."""
        if not self._formed:
            return None
        formed = self._formed.popleft()
        self._num_popped += 1
        self._recent_drops = []
        groups = tuple(
            BatchGroup(
                group.group,
                group.rank,
                tuple(
                    BatchMember(group.slot_of(fact), fact.sequence, fact.reward)
                    for fact in group.usable
                    if fact.reward is not None
                ),
            )
            for group in formed.groups
        )
        return Batch(self._num_popped, groups, formed.cursor, formed.position)

    @property
    def num_steps(self) -> int:
        """Batches popped in the run."""
        return self._num_popped

    @property
    def position(self) -> int:
        """SAMPLES sequence of the newest record taken in; reading goes on after it."""
        return self._position

    @property
    def cursor(self) -> int:
        """Lowest sequence of a record in no popped batch and no dropped group; `position + 1` when there is none."""
        waiting = [group.first_sequence for formed in self._formed for group in formed.groups]
        return min([*waiting, self._lowest_pending()])

    def is_pending(self, rank: int) -> bool:
        """Whether the group has records that no popped batch or drop has settled."""
        formed = (group.rank for batch in self._formed for group in batch.groups)
        return rank in self._open or rank in self._ready or rank in formed

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks, up to the highest one seen, whose groups are not complete: what a batch may wait for."""
        highest = max([*self._open, *(end - 1 for _, end in self._complete)], default=-1)
        return tuple(rank for rank in range(self._complete.first_gap, highest + 1) if rank not in self._complete)

    def to_dict(self) -> dict[str, Any]:
        """The whole state as JSON values; `from_dict` of it has the same `to_dict`."""
        return {
            "version": STATE_VERSION,
            "batch_groups": self._batch_groups,
            "position": self._position,
            "num_popped": self._num_popped,
            "num_taken": self._num_taken,
            "num_issued": self._num_issued,
            "complete": [list(pair) for pair in self._complete],
            "dropped": [list(pair) for pair in self._dropped],
            "open": [self._open[rank].to_dict() for rank in sorted(self._open)],
            "ready": [self._ready[rank].to_dict() for rank in sorted(self._ready)],
            "formed": [
                {"groups": [group.to_dict() for group in formed.groups]}
                | {"cursor": formed.cursor, "position": formed.position}
                for formed in self._formed
            ],
            "drops": [asdict(drop) for drop in (*self._recent_drops, *self._drops)],
        }

    @classmethod
    def from_dict(
        cls,
        state: Mapping[str, Any],
        *,
        batch_groups: int,
        straggler_bound: int = 0,
        min_group: int = 2,
        drop_constant_groups: bool = False,
        credits_calls: bool = False,
    ) -> "LearnerFold":
        """The fold that wrote `state`; the settings may have changed, and hold for what is not complete yet.

        With another batch size, batches that were formed but not popped are formed again.

        Raises:
            RecordError: The state is of another version.
        """
        if state.get("version") != STATE_VERSION:
            raise RecordError(f"fold state of version {state.get('version')!r}; this AgentJet reads {STATE_VERSION}")
        fold = cls(
            batch_groups=batch_groups,
            straggler_bound=straggler_bound,
            min_group=min_group,
            drop_constant_groups=drop_constant_groups,
            credits_calls=credits_calls,
        )
        fold._load(state)
        return fold

    def _load(self, state: Mapping[str, Any]) -> None:
        self._position, self._num_issued = state["position"], state["num_issued"]
        self._num_popped, self._num_taken = state["num_popped"], state["num_taken"]
        self._complete = IntervalSet((start, end) for start, end in state["complete"])
        self._dropped = IntervalSet((start, end) for start, end in state["dropped"])
        self._open = {group["rank"]: FoldGroup.from_dict(group) for group in state["open"]}
        self._ready = {group["rank"]: FoldGroup.from_dict(group) for group in state["ready"]}
        self._drops = [Drop(**drop | {"reason": DropReason(drop["reason"])}) for drop in state["drops"]]
        for formed in state["formed"]:
            groups = [FoldGroup.from_dict(group) for group in formed["groups"]]
            self._formed.append(_Formed(groups, formed["cursor"], formed["position"]))
        if state["batch_groups"] != self._batch_groups:
            self._form_again()

    def _form_again(self) -> None:
        for formed in self._formed:
            self._num_taken -= len(formed.groups)
            self._ready |= {group.rank: group for group in formed.groups}
        self._formed.clear()
        self._form()

    def digest(self) -> str:
        """sha256 over the state."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
