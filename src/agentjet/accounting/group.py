"""A group as the learner's fold sees it: facts of its slots, never their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentjet.errors import RecordError
from agentjet.schemas.ids import GroupId, SlotId, slot_id
from agentjet.schemas.ledger import DropReason
from agentjet.schemas.sample import Sample, SlotRecord, Tombstone, TombstoneReason


@dataclass(frozen=True, slots=True)
class SlotFact:
    """What the fold keeps of one SAMPLES record."""

    member: int
    sequence: int
    """Of the record in SAMPLES; the sample is read again by it."""
    reward: float | None
    """None for a tombstone."""
    agent_rewards: tuple[tuple[str, float], ...] = ()
    is_unused: bool = False
    """A tombstone of an episode that never called the model."""
    call_range: tuple[float, float] | None = None
    """Lowest and highest reward of a single call; None where a call has none."""

    @classmethod
    def of(cls, sequence: int, record: SlotRecord) -> "SlotFact":
        """The facts of a sample or tombstone."""
        if isinstance(record, Sample):
            own = tuple(sorted(record.agent_rewards.items()))
            return cls(record.member, sequence, record.reward, own, call_range=_call_range(record))
        is_unused = isinstance(record, Tombstone) and record.reason is TombstoneReason.UNUSED
        return cls(record.member, sequence, None, is_unused=is_unused)


@dataclass(slots=True)
class FoldGroup:
    """A group whose slots arrive; complete when each member has its record."""

    group: GroupId
    rank: int
    size: int
    slots: dict[int, SlotFact] = field(default_factory=dict[int, SlotFact])
    """By member."""

    def take(self, sequence: int, record: SlotRecord) -> bool:
        """Take a slot's record in; False for a slot that is known. RecordError when it is not of this group."""
        if (record.group, record.group_size) != (self.group, self.size) or not 0 <= record.member < self.size:
            raise RecordError(
                f"SAMPLES {sequence}: slot {record.slot} of {record.group_size} can not have rank {self.rank}, "
                f"which is that of group {self.group} with {self.size} members"
            )
        if record.member in self.slots:
            return False
        self.slots[record.member] = SlotFact.of(sequence, record)
        return True

    @property
    def is_complete(self) -> bool:
        """Whether every member has its record."""
        return len(self.slots) == self.size

    @property
    def first_sequence(self) -> int:
        """Lowest SAMPLES sequence of its records."""
        return min(slot.sequence for slot in self.slots.values())

    @property
    def usable(self) -> tuple[SlotFact, ...]:
        """The samples, by member."""
        return tuple(slot for _, slot in sorted(self.slots.items()) if slot.reward is not None)

    def drop_reason(self, min_group: int, *, drop_constant: bool, credits_calls: bool) -> DropReason | None:
        """Why the complete group trains nobody, or None when it is usable.

        Args:
            min_group: Fewest usable members.
            drop_constant: Whether equal rewards teach nothing.
            credits_calls: Whether these are the rewards of single calls, where each call of the group has one.
        """
        usable = self.usable
        if not usable and all(slot.is_unused for slot in self.slots.values()):
            return DropReason.UNUSED
        if len(usable) < min_group:
            return DropReason.TOO_FEW
        if drop_constant and self._is_constant(credits_calls=credits_calls):
            return DropReason.CONSTANT
        return None

    def _is_constant(self, *, credits_calls: bool) -> bool:
        usable = self.usable
        ranges = [slot.call_range for slot in usable if slot.call_range is not None]
        if credits_calls and len(ranges) == len(usable):
            return len(usable) == 1 or min(low for low, _ in ranges) == max(high for _, high in ranges)
        return len({(slot.reward, slot.agent_rewards) for slot in usable}) == 1

    def slot_of(self, fact: SlotFact) -> SlotId:
        """`<group>.<member>` of one of its slots."""
        return slot_id(self.group, fact.member)

    def to_dict(self) -> dict[str, Any]:
        """JSON of the group; `from_dict` gives an equal one."""
        slots = [
            [slot.member, slot.sequence, slot.reward, [list(pair) for pair in slot.agent_rewards], slot.is_unused]
            + ([list(slot.call_range)] if slot.call_range else [])
            for _, slot in sorted(self.slots.items())
        ]
        return {"group": self.group, "rank": self.rank, "size": self.size, "slots": slots}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> "FoldGroup":
        """The group that `to_dict` wrote."""
        slots = {
            member: SlotFact(
                member,
                sequence,
                reward,
                tuple((name, value) for name, value in pairs),
                is_unused,
                (calls[0][0], calls[0][1]) if calls else None,
            )
            for member, sequence, reward, pairs, is_unused, *calls in state["slots"]
        }
        return cls(GroupId(state["group"]), state["rank"], state["size"], slots)


def _call_range(sample: Sample) -> tuple[float, float] | None:
    rewards = [call.reward for call in sample.calls if call.reward is not None]
    return (min(rewards), max(rewards)) if rewards and len(rewards) == len(sample.calls) else None
