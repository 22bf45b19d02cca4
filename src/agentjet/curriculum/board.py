"""Everything that is out: groups, their slots and the tickets that stand for them. Pure; fed from the streams.

Invariants:

- A slot has one current offer; offers before it have failed. A ticket of an issued group that is not current has ended.
- A paused ticket is current and has not been published: its slot waits to be offered again.
- A group leaves the board when nothing needs its records any more: a training group once every model's ledger has
  trained or dropped it (its samples then exist, even if that step is voided later), an evaluation once it has settled.
- Feeding a record twice changes nothing.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentjet.accounting.ticket import TicketState, state_of
from agentjet.schemas.ids import GroupId, RunId, TicketId, TicketName, group_id
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.score import Score
from agentjet.schemas.task import EpisodeKind, Ticket

MAX_CLAIMS = 5
"""How often a ticket is given out: an agent that takes its rollout's machine down must not do so for ever."""

TaskOf = Callable[[GroupIssue], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class LiveClaim:
    """The newest claim of a ticket."""

    attempt: int
    deadline: float
    """JetStream time."""
    number: int
    """Claims of the ticket so far."""

    @property
    def is_last(self) -> bool:
        """Whether the ticket is not given out any more."""
        return self.number >= MAX_CLAIMS


@dataclass(slots=True)
class GroupOut:
    """An issued group that the board still needs."""

    group: GroupId
    issue: GroupIssue
    time: float
    """When it was issued, JetStream time."""
    offers: list[int]
    """Current offer of each member."""
    open_members: set[int]
    """Members whose slot is not settled."""
    waiting_models: set[str]
    """Models whose ledger has neither trained nor dropped it."""

    @property
    def is_training(self) -> bool:
        """Whether learners wait for it."""
        return self.issue.kind is EpisodeKind.TRAIN


def tickets_of(run: RunId, issue: GroupIssue, task: Mapping[str, Any]) -> list[Ticket]:
    """The first offers of a group's slots, derived from the ledger's record and the data set."""
    return [ticket_of(run, issue, task, member, 0) for member in range(issue.size)]


def ticket_of(run: RunId, issue: GroupIssue, task: Mapping[str, Any], member: int, offer: int) -> Ticket:
    """One ticket of an issued group."""
    return Ticket(
        run=run,
        pool=issue.pool,
        group=group_id(issue.pool, issue.index),
        member=member,
        offer=offer,
        group_size=issue.size,
        max_offers=issue.max_offers,
        kind=issue.kind,
        models=issue.models,
        ranks=issue.ranks,
        task=dict(task),
        seed=issue.seed,
        deadline_seconds=issue.deadline_seconds,
        sampling=issue.sampling,
        pins=issue.pins,
        is_judged=issue.is_judged,
    )


@dataclass(slots=True)
class Board:
    """What is out in a run."""

    run: RunId
    task_of: TaskOf
    groups: dict[GroupId, GroupOut] = field(default_factory=dict[GroupId, GroupOut])
    """In order of issue."""
    claims: dict[TicketId, LiveClaim] = field(default_factory=dict[TicketId, LiveClaim])
    ended: set[TicketId] = field(default_factory=set[TicketId])
    """Current tickets known to have an end."""
    paused: dict[TicketId, float] = field(default_factory=dict[TicketId, float])
    """When each paused ticket is to be published, JetStream time."""
    evaluations: dict[int, list[tuple[GroupIssue, GroupOut]]] = field(default_factory=dict)
    """Issued evaluation groups by the step at which they were due."""
    _next_index: dict[str, int] = field(default_factory=dict[str, int])
    _evaluating: dict[GroupId, GroupOut] = field(default_factory=dict[GroupId, GroupOut])
    """The evaluation groups among `groups`: few, where training groups may be many thousands."""

    def issue(self, record: GroupIssue, time: float) -> None:
        """A group was issued."""
        if record.index < self._next_index.get(record.pool, 0):
            return
        self._next_index[record.pool] = record.index + 1
        group = group_id(record.pool, record.index)
        members = set(range(record.size))
        out = GroupOut(group, record, time, [0] * record.size, members, set(record.ranks))
        if out.is_training:
            self._pass_evaluations(record.models)
        else:
            self.evaluations.setdefault(record.eval_step, []).append((record, out))
            self._evaluating[group] = out
        self.groups[group] = out

    def _pass_evaluations(self, models: Collection[str]) -> None:
        # A model's training goes on only after its evaluation has settled, so the scores may have been purged since.
        for out in list(self._evaluating.values()):
            if not set(models).isdisjoint(out.issue.models):
                self._close(out)

    def score(self, score: Score) -> Ticket | None:
        """A ticket was scored; returns the next offer of its slot when there has to be one."""
        out = self.groups.get(score.ticket.group)
        member = score.ticket.member
        if out is None or member not in out.open_members or score.ticket.offer != out.offers[member]:
            return None
        self._forget_ticket(score.ticket.id)
        if state_of(score) is TicketState.REOFFERED:
            out.offers[member] += 1
            return self.ticket(out, member)
        out.open_members.discard(member)
        self._forget_if_done(out)
        return None

    def consume(self, group: GroupId, model: str) -> None:
        """A model's ledger trained or dropped the group, so every slot of it has settled."""
        out = self.groups.get(group)
        if out is None:
            return
        out.waiting_models.discard(model)
        self._close(out)

    def _close(self, out: GroupOut) -> None:
        for member in out.open_members:
            self._forget_ticket(TicketName(out.group, member, out.offers[member]).id)
        out.open_members.clear()
        self._forget_if_done(out)

    def _forget_ticket(self, ticket: TicketId) -> None:
        self.claims.pop(ticket, None)
        self.ended.discard(ticket)
        self.paused.pop(ticket, None)

    def _forget_if_done(self, out: GroupOut) -> None:
        if not out.open_members and not out.waiting_models:
            self.groups.pop(out.group, None)
            self._evaluating.pop(out.group, None)

    def claim(self, ticket: TicketId, attempt: int, deadline: float, number: int) -> None:
        """A ticket has a new player: the `number`-th. Nothing to note once its slot has gone on."""
        if self.is_current(ticket):
            self.claims[ticket] = LiveClaim(attempt, deadline, number)
            self.paused.pop(ticket, None)

    def end(self, ticket: TicketId) -> None:
        """A ticket is known to have an end. Nothing to note once its slot has gone on."""
        if self.is_current(ticket):
            self.ended.add(ticket)
            self.paused.pop(ticket, None)

    def has_ended(self, out: GroupOut, member: int) -> bool:
        """Whether an open slot's current ticket is known to have an end."""
        return TicketName(out.group, member, out.offers[member]).id in self.ended

    def is_current(self, ticket: TicketId) -> bool:
        """Whether it is the newest offer of an open slot."""
        name = TicketName.parse(ticket)
        out = self.groups.get(name.group)
        return out is not None and name.member in out.open_members and name.offer == out.offers[name.member]

    def may_have_ended(self, ticket: Ticket) -> bool:
        """Whether a current ticket can have an end: its players write one, or its deadline, which a claim sets.

        Tickets of clients have a deadline from their issue on.
        """
        out = self.groups.get(ticket.group)
        return out is None or bool(out.issue.client_group) or ticket.id in self.claims or ticket.id in self.ended

    def ticket(self, out: GroupOut, member: int) -> Ticket:
        """The current ticket of a slot."""
        return ticket_of(self.run, out.issue, self.task_of(out.issue), member, out.offers[member])

    def find(self, text: str) -> Ticket | str:
        """A current ticket by its id, or why there is none: "ended" or "unknown"."""
        try:
            name = TicketName.parse(text)
        except ValueError:
            return "unknown"
        pool, _, index = name.group.rpartition("-")
        if not index.isdecimal() or int(index) >= self._next_index.get(pool, 0):
            return "unknown"
        out = self.groups.get(name.group)
        if out is None:
            return "ended"
        if name.member >= out.issue.size or name.offer > out.offers[name.member]:
            return "unknown"
        if name.member not in out.open_members or name.offer < out.offers[name.member]:
            return "ended"
        return self.ticket(out, name.member)

    def pool_of(self, ticket: TicketId) -> str:
        """The pool of a current ticket."""
        return self.groups[TicketName.parse(ticket).group].issue.pool

    def is_offering_again(self, pool: str) -> bool:
        """Whether an offer of the pool that follows a failure is out."""
        return any(
            out.issue.pool == pool and out.offers[member] > 0 and ticket not in self.paused
            for out, member, ticket in self.open_slots()
        )

    def has_open_members(self, group: GroupId) -> bool:
        """Whether a slot of the group is unsettled."""
        out = self.groups.get(group)
        return out is not None and bool(out.open_members)

    def open_slots(self) -> Iterator[tuple[GroupOut, int, TicketId]]:
        """Unsettled slots with the ids of their current tickets, in order of issue."""
        for out in self.groups.values():
            for member in sorted(out.open_members):
                yield out, member, TicketName(out.group, member, out.offers[member]).id

    def deadline(self, out: GroupOut, ticket: TicketId) -> float | None:
        """JetStream time by which a ticket has to have ended; None while nobody has claimed it."""
        claim = self.claims.get(ticket)
        if claim is not None:
            return claim.deadline
        return out.time + out.issue.deadline_seconds if out.issue.client_group else None

    @property
    def has_open_training(self) -> bool:
        """Whether a training slot is unsettled."""
        return any(out.is_training and out.open_members for out in self.groups.values())

    def num_waiting(self, model: str) -> int:
        """Groups whose slots have all settled and that the model's learner has not taken."""
        return sum(not out.open_members and model in out.waiting_models for out in self.groups.values())

    @property
    def low_water(self) -> float | None:
        """Time of issue of the oldest group on the board; None when nothing is out."""
        return next((out.time for out in self.groups.values()), None)
