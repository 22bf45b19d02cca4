"""Is every issued episode accounted for, exactly once? Differences between what the streams hold. Pure.

`Audit` is fed with what was found, in any order but the ledger's own, and `report` takes the differences:
issued but not ended, ended without an outcome, an outcome but not sampled, sampled but not settled. Each is work in
progress, with its oldest id and age. What differs for good is counted too: offers that failed and were followed by
another, those that the curriculum buried, evaluations, what no step uses.

Two numbers have to be 0 at all times: `lost` (a slot of a settled group whose record is missing, or whose sample the
step left out) and `duplicated` (a slot that two steps that count have trained).

What a purge took away is not missing: records of a settled group count as there in a stream that was purged, and an
outcome that was purged as a reward.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from agentjet.accounting.ledger import CurriculumView, LedgerView
from agentjet.accounting.ticket import TicketState, advance, state_of
from agentjet.schemas.episode import DEADLINE
from agentjet.schemas.ids import GroupId, SlotId, TicketId, TicketName, group_id, slot_id
from agentjet.schemas.ledger import CurriculumStart, GroupDrop, GroupIssue, LearnerStart, LearnerStep, RunFinish
from agentjet.schemas.record import Record
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.task import EpisodeKind


@dataclass(frozen=True, slots=True)
class Difference:
    """Things that have come to one place and not to the next."""

    count: int = 0
    oldest_id: str = ""
    oldest_age_seconds: float = 0.0
    """By JetStream times."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What was found, and what is on its way."""

    groups: int
    """Groups issued."""
    issued: int
    """Tickets: every offer of every slot."""
    ended: int
    """Tickets with an end."""
    scored: int
    """Tickets with a reward."""
    failed: int
    """Tickets whose outcome is no reward; each has an end, be it the curriculum's."""
    sampled: int
    """Samples and tombstones, over all models."""
    sampled_slots: int
    """Slots that these are of."""
    settled: int
    """Slots that are done: trained or dropped by every model of theirs, or evaluated."""
    trained: int
    """Samples in the steps that count, over all models."""
    dropped: int
    """Groups that no step will use, over all models."""
    evaluated: int
    """Tickets of evaluations with an outcome; they reach no learner. Without those that were followed by another."""
    reoffered: int
    """Failed tickets that were followed by the slot's next offer."""
    buried: int
    """Failed tickets that the curriculum ended, because nobody did in time."""
    untrained: int
    """Settled samples and tombstones that no step trained: of dropped groups, or without a reward; over all models."""
    lost: int
    duplicated: int
    issued_not_ended: Difference
    ended_not_scored: Difference
    unjudged: int
    """Of these: members of judged groups of which others have not ended, so that the judge waits."""
    scored_not_sampled: Difference
    sampled_not_settled: Difference
    states: dict[str, int]
    """Tickets by state."""
    problems: tuple[str, ...]
    """Ids of what is lost or duplicated, at most 20."""

    def counts(self) -> dict[str, int]:
        """The plain numbers."""
        names = (
            "settled",
            "lost",
            "duplicated",
            "issued",
            "ended",
            "scored",
            "failed",
            "sampled",
            "trained",
            "dropped",
        )
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class _Slot:
    group: GroupId
    issue: GroupIssue
    slot: SlotId
    time: float


@dataclass(slots=True)
class Audit:
    """What was found in a run's streams."""

    _curriculum: CurriculumView = field(default_factory=CurriculumView)
    _learners: dict[str, LedgerView] = field(default_factory=dict[str, LedgerView])
    _issues: dict[GroupId, GroupIssue] = field(default_factory=dict[GroupId, GroupIssue])
    """In order of issue; without tasks, which may be large."""
    _steps: dict[int, LearnerStep] = field(default_factory=dict[int, LearnerStep])
    """By LEDGER sequence, voided ones too."""
    _times: dict[GroupId, float] = field(default_factory=dict[GroupId, float])
    _claims: set[TicketId] = field(default_factory=set[TicketId])
    _ends: dict[TicketId, float] = field(default_factory=dict[TicketId, float])
    _scores: dict[TicketId, tuple[TicketState, float]] = field(default_factory=dict)
    _samples: dict[tuple[str, SlotId], tuple[bool, float]] = field(default_factory=dict)
    _buried: set[TicketId] = field(default_factory=set[TicketId])
    _evaluations: dict[GroupId, GroupIssue] = field(default_factory=dict[GroupId, GroupIssue])
    """Of which the ledger does not say that they have settled."""
    _purged: set[str] = field(default_factory=set[str])

    def ledger(self, sequence: int, time: float, record: Record) -> None:
        """A record of LEDGER, of any chain, in order; RecordError when a chain is damaged."""
        match record:
            case LearnerStart() | LearnerStep() | GroupDrop():
                self._learners.setdefault(record.model, LedgerView()).apply(sequence, record)
                if isinstance(record, LearnerStep):
                    self._steps[sequence] = record
            case GroupIssue() | CurriculumStart() | RunFinish():
                self._curriculum.apply(sequence, record)
                if isinstance(record, GroupIssue):
                    group = group_id(record.pool, record.index)
                    self._times[group], self._issues[group] = time, record.model_copy(update={"task": None})
                self._pass_evaluations(record)
            case _:
                pass

    def _pass_evaluations(self, record: CurriculumStart | GroupIssue | RunFinish) -> None:
        """A model's training goes on, and a run ends, only after its evaluations have settled."""
        if isinstance(record, RunFinish):
            self._evaluations.clear()
        elif isinstance(record, GroupIssue) and record.kind is EpisodeKind.EVAL:
            self._evaluations[group_id(record.pool, record.index)] = record
        elif isinstance(record, GroupIssue):
            models = set(record.models)
            self._evaluations = {
                group: issue for group, issue in self._evaluations.items() if models.isdisjoint(issue.models)
            }

    def claim(self, ticket: TicketId) -> None:
        """CLAIMS holds a claim of the ticket."""
        self._claims.add(ticket)

    def end(self, ticket: TicketId, time: float) -> None:
        """EPISODES holds the ticket's end."""
        self._ends[ticket] = time

    def score(self, score: Score, time: float) -> None:
        """SCORES holds the ticket's outcome."""
        self._scores[score.ticket.id] = (state_of(score), time)
        if score.outcome is Outcome.DEAD and score.fault is not None and score.fault.kind == DEADLINE:
            self._buried.add(score.ticket.id)

    def sample(self, model: str, slot: SlotId, time: float, *, is_sample: bool) -> None:
        """SAMPLES holds the slot's sample or tombstone."""
        self._samples[model, slot] = (is_sample, time)

    def purged(self, stream: str) -> None:
        """Records of the stream were purged: "EPISODES", "SCORES" or "SAMPLES"."""
        self._purged.add(stream)

    def report(self, now: float) -> AuditReport:
        """The differences at JetStream time `now`."""
        settled = {model: self._settled_groups(model) for model in self._learners}
        done = {slot.slot for slot in self._slots() if self._is_done(slot, settled)}
        tickets = [(slot, ticket) for slot in self._slots() for ticket in self._tickets(slot)]
        states = {ticket: self._state(ticket) for _, ticket in tickets}
        is_known = {
            (stream, ticket): slot.slot in done and stream in self._purged
            for slot, ticket in tickets
            for stream in ("EPISODES", "SCORES")
        }
        closed = {ticket for _, ticket in tickets if ticket in self._scores or is_known["SCORES", ticket]}
        failed = {ticket for ticket in closed if states[ticket] in (TicketState.REOFFERED, TicketState.DEAD)}
        # An outcome comes from an end, be it purged meanwhile.
        has_end = self._ends.keys() | self._scores.keys()
        ended = {ticket for _, ticket in tickets if ticket in has_end or is_known["EPISODES", ticket]}
        open_ends = {ticket for _, ticket in tickets if ticket in self._ends and ticket not in closed}
        unended = {slot.group for slot, ticket in tickets if ticket not in ended}
        lost, duplicated = sorted(self._lost(settled)), sorted(self._duplicated())
        is_sampled = self._samples.keys() | set(self._purged_samples(settled))
        trained = {(model, one) for model in self._learners for step in self._steps_of(model) for one in step.members}
        unsettled = [
            (f"{model} {slot}", time)
            for (model, slot), (_, time) in self._samples.items()
            if _group(slot) not in settled.get(model, ())
        ]
        return AuditReport(
            groups=len(self._times),
            issued=len(tickets),
            ended=len(ended),
            scored=len(closed - failed),
            failed=len(failed),
            sampled=len(is_sampled),
            sampled_slots=len({slot for _, slot in is_sampled}),
            settled=len(done),
            trained=sum(len(step.members) for model in self._learners for step in self._steps_of(model)),
            dropped=sum(view.num_dropped for view in self._learners.values()),
            evaluated=sum(
                slot.issue.kind is EpisodeKind.EVAL and ticket in closed and states[ticket] is not TicketState.REOFFERED
                for slot, ticket in tickets
            ),
            reoffered=sum(state is TicketState.REOFFERED for state in states.values()),
            buried=len(failed & self._buried),
            untrained=sum(
                (model, slot) not in trained and _group(slot) in settled.get(model, ()) for model, slot in is_sampled
            ),
            lost=len(lost),
            duplicated=len(duplicated),
            issued_not_ended=_difference(((one, slot.time) for slot, one in tickets if one not in ended), now),
            ended_not_scored=_difference(((one, self._ends[one]) for one in open_ends), now),
            unjudged=sum(slot.issue.is_judged and slot.group in unended and one in open_ends for slot, one in tickets),
            scored_not_sampled=_difference(self._unsampled(done), now),
            sampled_not_settled=_difference(unsettled, now),
            states=dict(sorted(Counter(state.value for state in states.values()).items())),
            problems=tuple([f"lost: {one}" for one in lost] + [f"duplicated: {one}" for one in duplicated])[:20],
        )

    def _slots(self) -> Iterator[_Slot]:
        for group, issue in self._issues.items():
            for member in range(issue.size):
                yield _Slot(group, issue, slot_id(group, member), self._times[group])

    def _tickets(self, slot: _Slot) -> Iterator[TicketId]:
        for offer in range(slot.issue.max_offers):
            ticket = TicketId(f"{slot.slot}.{offer}")
            yield ticket
            if self._scores.get(ticket, (None, 0.0))[0] is not TicketState.REOFFERED:
                return

    def _state(self, ticket: TicketId) -> TicketState:
        state = TicketState.CLAIMED if ticket in self._claims else TicketState.ISSUED
        if ticket in self._ends:
            state = advance(state, TicketState.ENDED)
        return advance(state, self._scores[ticket][0]) if ticket in self._scores else state

    def _settled_groups(self, model: str) -> set[GroupId]:
        view = self._learners[model]
        ranks = {issue.ranks[model]: group for group, issue in self._issues.items() if model in issue.ranks}
        dropped = {ranks[rank] for rank in view.dropped if rank in ranks}
        return dropped.union(*(step.groups for step in self._steps_of(model)))

    def _steps_of(self, model: str) -> list[LearnerStep]:
        """Those that count."""
        return [self._steps[step.sequence] for step in self._learners[model].steps]

    def _is_done(self, slot: _Slot, settled: dict[str, set[GroupId]]) -> bool:
        if slot.issue.kind is EpisodeKind.TRAIN:
            return all(slot.group in settled.get(model, ()) for model in slot.issue.ranks)
        if "SCORES" in self._purged and slot.group not in self._evaluations:
            return True
        last = list(self._tickets(slot))[-1]
        return self._scores.get(last, (None, 0.0))[0] in (TicketState.SCORED, TicketState.DEAD)

    def _unsampled(self, done: set[SlotId]) -> Iterator[tuple[str, float]]:
        for slot in self._slots():
            state, time = self._scores.get(list(self._tickets(slot))[-1], (None, 0.0))
            if state not in (TicketState.SCORED, TicketState.DEAD) or slot.slot in done:
                continue
            for model in slot.issue.ranks:
                if (model, slot.slot) not in self._samples:
                    yield f"{model} {slot.slot}", time

    def _purged_samples(self, settled: dict[str, set[GroupId]]) -> Iterator[tuple[str, SlotId]]:
        """What is not in SAMPLES any more, where that was purged."""
        for slot in self._slots() if "SAMPLES" in self._purged else ():
            for model in slot.issue.ranks:
                if slot.group in settled.get(model, ()):
                    yield model, slot.slot

    def _lost(self, settled: dict[str, set[GroupId]]) -> Iterator[str]:
        trained = {
            model: {member for step in self._steps_of(model) for member in step.members} for model in self._learners
        }
        stepped = {
            model: {group for step in self._steps_of(model) for group in step.groups} for model in self._learners
        }
        for slot in self._slots():
            for model in slot.issue.ranks:
                if slot.group not in settled.get(model, ()):
                    continue
                is_sample = self._samples.get((model, slot.slot), (None, 0.0))[0]
                is_missing = is_sample is None and "SAMPLES" not in self._purged
                is_left_out = bool(is_sample) and slot.group in stepped[model] and slot.slot not in trained[model]
                if is_missing or is_left_out:
                    yield f"{model} {slot.slot}"

    def _duplicated(self) -> Iterator[str]:
        for model in self._learners:
            times = Counter(member for step in self._steps_of(model) for member in step.members)
            yield from (f"{model} {member}" for member, count in times.items() if count > 1)


def _group(slot: SlotId) -> GroupId:
    return TicketName.parse(f"{slot}.0").group


def _difference(found: Iterable[tuple[str, float]], now: float) -> Difference:
    ordered = sorted(found, key=lambda one: (one[1], one[0]))
    if not ordered:
        return Difference()
    oldest, time = ordered[0]
    return Difference(len(ordered), oldest, round(max(0.0, now - time), 3))
