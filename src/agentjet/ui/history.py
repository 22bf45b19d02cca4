"""Read model of a run: what its log says so far about steps, evaluations and counts.

Invariants:

- `RunHistory.apply` is pure bookkeeping: the same records give the same history, and a record that was applied already
  is ignored, so a reader may start again anywhere.
- Which steps count is `LedgerView`'s to say. Streams arrive in any order relative to one another:
  evaluation scores wait for the ledger's record of their group.

It draws nothing and decides nothing.
"""

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from agentjet.accounting.ledger import LedgerView
from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read
from agentjet.errors import RecordError
from agentjet.schemas.ids import GroupId, RunId, SlotId, group_id
from agentjet.schemas.ledger import CurriculumStart, GroupDrop, GroupIssue, LearnerStart, LearnerStep, RunFinish
from agentjet.schemas.record import Record
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream, stream_name, stream_subjects
from agentjet.schemas.task import EpisodeKind

_READ_STREAMS = (Stream.LEDGER, Stream.SCORES)
_COUNTED_STREAMS = (Stream.EPISODES, Stream.SAMPLES)


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One valid optimizer step."""

    step: int
    sequence: int
    """Its place in LEDGER; rises even where a resumed learner takes the same step again."""
    time: float
    """When it was stored, seconds since the epoch."""
    metrics: Mapping[str, float]
    members: tuple[str, ...] = ()
    is_skipped: bool = False

    def value(self, name: str) -> float | None:
        """A metric, or None where it is absent or not finite."""
        value = self.metrics.get(name, math.nan)
        return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """What an evaluation has given so far."""

    step: int
    models: tuple[str, ...]
    num_slots: int
    num_closed: int
    """Slots that are scored or dead."""
    num_scored: int
    reward_mean: float | None
    """Over scored episodes; None before the first."""
    metrics: Mapping[str, float]
    """Means of the clients' metrics over scored episodes."""

    @property
    def is_complete(self) -> bool:
        """Whether every slot is closed."""
        return self.num_closed >= self.num_slots


@dataclass(slots=True)
class ModelHistory:
    """The valid steps of one model, in order."""

    name: str
    steps: list[StepPoint] = field(default_factory=list)
    started: float = 0.0
    """When the present learner took over."""
    _ledger: LedgerView = field(default_factory=LedgerView)

    def apply(self, sequence: int, time: float, record: LearnerStart | LearnerStep | GroupDrop) -> None:
        """Take in the chain's next record; RecordError when it can not follow those before it."""
        self._ledger.apply(sequence, record)
        if isinstance(record, LearnerStart):
            self.started = time
            valid = {taken.sequence for taken in self._ledger.steps}
            self.steps = [point for point in self.steps if point.sequence in valid]
        elif isinstance(record, LearnerStep):
            self.steps.append(StepPoint(record.step, sequence, time, record.metrics, record.members, record.is_skipped))

    @property
    def step(self) -> int:
        """Steps contained in the newest weights."""
        return self._ledger.num_steps

    @property
    def num_dropped_groups(self) -> int:
        """Groups that no step will use."""
        return self._ledger.num_dropped

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) wherever the metric is there and finite."""
        return [(point.step, value) for point in self.steps if (value := point.value(name)) is not None]

    def latest(self, name: str) -> float | None:
        """The newest finite value of a metric."""
        return next((value for point in reversed(self.steps) if (value := point.value(name)) is not None), None)

    def metric_names(self, prefix: str) -> list[str]:
        """Sorted names of the metrics that begin with `prefix`."""
        return sorted({name for point in self.steps for name in point.metrics if name.startswith(prefix)})


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of records along the way of an episode."""

    issued: int
    """Tickets, training and evaluation: every offer of every slot."""
    ended: int
    """Episodes, each offer of a slot counted."""
    scored: int
    """Episodes with a reward."""
    failed: int
    """Episodes that ended without one: invalid, aborted or dead."""
    sampled: int
    """Samples and tombstones, for each model."""
    settled: int
    """Slots in valid steps, for each model."""


class RunHistory:
    """What the log of one run says so far."""

    def __init__(self) -> None:
        self.models: dict[str, ModelHistory] = {}
        self.finish_reason: str | None = None
        """Why the run issues nothing more, once it does not."""
        self.num_unreadable = 0
        """Records left out because they could not be read or can not follow those before them."""
        self._groups: dict[GroupId, GroupIssue] = {}
        self._eval_scores: defaultdict[GroupId, dict[SlotId, Score]] = defaultdict(dict)
        self._num_records: defaultdict[Stream, int] = defaultdict(int)
        self._num_scored = self._num_failed = self._num_reoffered = 0
        self._applied: dict[Stream, int] = {}

    def apply(self, stream: Stream, sequence: int, time: float, record: Record | None) -> None:
        """Take in the next record of a stream; None where only its existence counts (EPISODES, SAMPLES)."""
        if sequence <= self._applied.get(stream, 0):
            return
        self._applied[stream] = sequence
        self._num_records[stream] += 1
        match record:
            case LearnerStart() | LearnerStep() | GroupDrop():
                try:
                    self.models.setdefault(record.model, ModelHistory(record.model)).apply(sequence, time, record)
                except RecordError:
                    self.num_unreadable += 1
            case GroupIssue():
                # Without its task, which may be large.
                self._groups[group_id(record.pool, record.index)] = record.model_copy(update={"task": None})
            case CurriculumStart():
                self.finish_reason = None
            case RunFinish():
                self.finish_reason = record.reason
            case Score():
                self._score(record)
            case _:
                pass

    def next_sequence(self, stream: Stream) -> int:
        """Where a reader goes on."""
        return self._applied.get(stream, 0) + 1

    @property
    def counts(self) -> Counts:
        """Numbers of records along the way of an episode."""
        return Counts(
            issued=sum(issue.size for issue in self._groups.values()) + self._num_reoffered,
            ended=self._num_records[Stream.EPISODES],
            scored=self._num_scored,
            failed=self._num_failed,
            sampled=self._num_records[Stream.SAMPLES],
            settled=sum(len(point.members) for model in self.models.values() for point in model.steps),
        )

    @property
    def evals(self) -> list[EvalPoint]:
        """Evaluations by step; of those repeated at the same step after a resume, the newest."""
        by_step: dict[int, list[tuple[GroupId, GroupIssue]]] = {}
        for name, issue in self._groups.items():
            if issue.kind is not EpisodeKind.EVAL:
                continue
            groups = by_step.setdefault(issue.eval_step, [])
            if groups and groups[-1][1].pins != issue.pins:
                groups.clear()
            groups.append((name, issue))
        return [self._evaluation(step, groups) for step, groups in sorted(by_step.items())]

    def _score(self, score: Score) -> None:
        self._num_scored += score.outcome is Outcome.SCORED
        self._num_failed += score.outcome is not Outcome.SCORED
        self._num_reoffered += not score.closes_slot
        if score.ticket.kind is EpisodeKind.EVAL and score.closes_slot:
            self._eval_scores[score.ticket.group][score.ticket.slot] = score

    def _evaluation(self, step: int, groups: list[tuple[GroupId, GroupIssue]]) -> EvalPoint:
        closed = [score for name, _ in groups for score in self._eval_scores.get(name, {}).values()]
        scored = [score for score in closed if score.outcome is Outcome.SCORED]
        rewards = [{"reward": score.reward} for score in scored if score.reward is not None]
        return EvalPoint(
            step=step,
            models=groups[-1][1].models,
            num_slots=sum(issue.size for _, issue in groups),
            num_closed=len(closed),
            num_scored=len(scored),
            reward_mean=_means(rewards).get("reward"),
            metrics=_means(score.metrics for score in scored),
        )


def _means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each finite metric over the rows that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        for name, value in row.items():
            if math.isfinite(value):
                values[name].append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


async def follow(bus: Bus, run: RunId, history: RunHistory, on_change: Callable[[], None] | None = None) -> None:
    """Keep a history up to date until cancelled; `on_change` is called after each record."""

    async def tail(stream: Stream) -> None:
        subject = stream_subjects(run, stream)[0]
        async for message in bus.tail(stream_name(run, stream), subject, start=history.next_sequence(stream)):
            await _take(bus, run, stream, message, history)
            if on_change is not None:
                on_change()

    async with asyncio.TaskGroup() as tasks:
        for stream in _READ_STREAMS + _COUNTED_STREAMS:
            tasks.create_task(tail(stream), name=f"follow {stream}")


async def catch_up(bus: Bus, run: RunId, history: RunHistory) -> None:
    """Take in what the log holds beyond what the history has seen."""
    for stream in _READ_STREAMS + _COUNTED_STREAMS:
        subject, start = stream_subjects(run, stream)[0], history.next_sequence(stream)
        async for message in bus.scan(stream_name(run, stream), subject, start=start):
            await _take(bus, run, stream, message, history)


async def _take(bus: Bus, run: RunId, stream: Stream, message: StoredMessage, history: RunHistory) -> None:
    """Apply a message; one that can not be read is counted, since a display must not stop a run."""
    record: Record | None = None
    if stream in _READ_STREAMS:
        try:
            record = await read(bus, run, stream, message)
        except RecordError:
            history.num_unreadable += 1
    history.apply(stream, message.sequence, message.time, record)
