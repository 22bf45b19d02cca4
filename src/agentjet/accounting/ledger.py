"""What the ledger says: a pure reading of the chains of learners and of the curriculum.

Invariants:

- A `LearnerStart` voids every step and drop after its base; a voided version is never valid again.
- A learner starts from exactly the weights of its base, so valid versions of one step are the same weights.
- Steps of the surviving line are numbered 1, 2, 3, ... without a gap; a chain that says otherwise is damaged.
- Records of another chain are ignored, so that one view may be fed a whole stream.
- Views are small: they hold a few numbers for each step and each drop, never the records, as long runs have many.

It does not know the bus: records come with their sequences, in order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from agentjet.errors import RecordError
from agentjet.schemas.ids import Version
from agentjet.schemas.ledger import CurriculumStart, GroupDrop, GroupIssue, LearnerStart, LearnerStep, RunFinish
from agentjet.schemas.record import Record


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step that counts."""

    sequence: int
    """Of its LEDGER record."""
    version: Version
    """The weights it made."""
    num_groups: int
    """Groups trained in the run up to and with this step."""


class LedgerView:
    """The state of one learner's chain (`ledger.<model>`).

    Example:
        view = LedgerView()
        view.apply(sequence, record)
        view.head, view.num_steps, view.is_valid(Version(1, 3))
    """

    def __init__(self) -> None:
        self._steps: list[TakenStep] = []
        self._start: LearnerStart | None = None
        self._versions: dict[Version, int] = {}
        self._drops: dict[int, int] = {}

    def apply(self, sequence: int, record: Record) -> None:
        """Take in the chain's next record.

        Raises:
            RecordError: The record can not follow those before it.
        """
        match record:
            case LearnerStart():
                self._begin(sequence, record)
            case LearnerStep():
                self._take(sequence, record)
            case GroupDrop():
                self._check_incarnation(sequence, record.model, record.incarnation)
                self._drops.setdefault(record.rank, len(self._steps))
            case _:
                pass

    def _begin(self, sequence: int, record: LearnerStart) -> None:
        if record.incarnation <= self.incarnation or not 0 <= record.base_step <= len(self._steps):
            raise RecordError(
                f"LEDGER {sequence}: incarnation {record.incarnation} of {record.model} starts from step "
                f"{record.base_step}, but incarnation {self.incarnation} stands at step {len(self._steps)}"
            )
        base = record.base_step
        del self._steps[base:]
        self._versions = {version: place for version, place in self._versions.items() if version.step <= base}
        # A drop recorded after step `base` may be missing in that step's checkpoint; the learner records it again.
        self._drops = {rank: steps for rank, steps in self._drops.items() if steps < base}
        self._start = record
        self._versions[Version(record.incarnation, base)] = sequence

    def _take(self, sequence: int, record: LearnerStep) -> None:
        self._check_incarnation(sequence, record.model, record.incarnation)
        if record.step != len(self._steps) + 1:
            raise RecordError(
                f"LEDGER {sequence}: step {record.step} of {record.model} follows step {len(self._steps)}"
            )
        version = Version(record.incarnation, record.step)
        self._steps.append(TakenStep(sequence, version, self.num_groups + len(record.groups)))
        self._versions[version] = sequence

    def _check_incarnation(self, sequence: int, model: str, incarnation: int) -> None:
        if self._start is None or incarnation != self.incarnation:
            raise RecordError(
                f"LEDGER {sequence}: a record of incarnation {incarnation} of {model} stands under incarnation "
                f"{self.incarnation}"
            )

    @property
    def incarnation(self) -> int:
        """Of the newest learner; 0 before the first."""
        return 0 if self._start is None else self._start.incarnation

    @property
    def start(self) -> LearnerStart | None:
        """The newest learner's start, or None while no learner has started."""
        return self._start

    @property
    def head(self) -> Version | None:
        """The newest valid version: the last step's, or the start's while no step follows it."""
        if self._start is None:
            return None
        return Version(self.incarnation, len(self._steps))

    @property
    def num_steps(self) -> int:
        """Steps that count."""
        return len(self._steps)

    @property
    def num_groups(self) -> int:
        """Groups trained by the steps that count."""
        return self._steps[-1].num_groups if self._steps else 0

    @property
    def steps(self) -> tuple[TakenStep, ...]:
        """The steps that count, in order."""
        return tuple(self._steps)

    @property
    def last_step(self) -> TakenStep | None:
        """The last step that counts."""
        return self._steps[-1] if self._steps else None

    @property
    def dropped(self) -> frozenset[int]:
        """Ranks of the groups that no step will use."""
        return frozenset(self._drops)

    @property
    def num_dropped(self) -> int:
        """How many groups no step will use."""
        return len(self._drops)

    @property
    def versions(self) -> Mapping[Version, int]:
        """Valid versions and the LEDGER sequence of the record that made each."""
        return dict(self._versions)

    def is_valid(self, version: Version) -> bool:
        """Whether LEDGER holds the version and has not voided it."""
        return version in self._versions

    def is_same(self, one: Version, other: Version) -> bool:
        """Whether two versions name the same weights: those of a learner's base, and of its start from them."""
        return one == other or (one.step == other.step and self.is_valid(one) and self.is_valid(other))


class CurriculumView:
    """The state of the curriculum's chain (`ledger.curriculum`)."""

    def __init__(self) -> None:
        self._incarnation = 0
        self._ranks: dict[str, int] = {}
        self._indices: dict[str, int] = {}
        self._finish: RunFinish | None = None

    def apply(self, sequence: int, record: Record) -> None:
        """Take in the chain's next record; RecordError when it can not follow those before it."""
        match record:
            case CurriculumStart():
                if record.incarnation <= self._incarnation:
                    raise RecordError(f"LEDGER {sequence}: curriculum {record.incarnation} follows {self._incarnation}")
                self._incarnation, self._finish = record.incarnation, None
            case GroupIssue():
                self._issue(sequence, record)
            case RunFinish():
                self._finish = record
            case _:
                pass

    def _issue(self, sequence: int, record: GroupIssue) -> None:
        if record.index != self.next_index(record.pool):
            raise RecordError(
                f"LEDGER {sequence}: group {record.index} of pool {record.pool} follows "
                f"group {self.next_index(record.pool) - 1}"
            )
        for model, rank in record.ranks.items():
            if rank != self.num_issued(model):
                raise RecordError(f"LEDGER {sequence}: rank {rank} of {model} follows {self.num_issued(model) - 1}")
            self._ranks[model] = rank + 1
        self._indices[record.pool] = record.index + 1

    @property
    def incarnation(self) -> int:
        """Of the newest curriculum; 0 before the first."""
        return self._incarnation

    @property
    def finish(self) -> RunFinish | None:
        """The end of the run, unless a curriculum has started since."""
        return self._finish

    def next_index(self, pool: str) -> int:
        """Index of the pool's next group."""
        return self._indices.get(pool, 0)

    def num_issued(self, model: str) -> int:
        """Groups issued for a model's training; the next one's rank."""
        return self._ranks.get(model, 0)

    @property
    def models(self) -> tuple[str, ...]:
        """Models that a group was issued for, in the order of their first one."""
        return tuple(self._ranks)
