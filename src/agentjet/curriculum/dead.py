"""What died: slots whose last offer failed or that were buried, read from a run's streams.

A slot is dead when the score that closes it has no reward. Records that a purge took away are not seen any more.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass

from agentjet.bus.protocol import Bus, StoredMessage
from agentjet.bus.record import read
from agentjet.errors import RecordError
from agentjet.schemas import subject
from agentjet.schemas.claim import Claim
from agentjet.schemas.episode import Episode, Fault
from agentjet.schemas.ids import GroupId, RunId, SlotId, TicketId, TicketName, group_id
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.record import Record
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import CURRICULUM, Stream, stream_name


@dataclass(frozen=True, slots=True)
class DeadSlot:
    """A slot that has no reward and gets none."""

    ticket: TicketId
    """The offer that closed it."""
    group: GroupId
    pool: str
    kind: str
    """`train` or `eval`."""
    outcome: str
    """Of its last offer: `invalid`, `aborted` or `dead`."""
    cause: str
    """Name of the fault."""
    message: str
    time: float
    """When it was settled, JetStream time in seconds since the epoch."""
    retried_as: str = ""
    """The group that plays its task again; empty while nobody asked."""


@dataclass(frozen=True, slots=True)
class ClaimSeen:
    """A claim of an offer."""

    attempt: int
    worker: str
    time: float


@dataclass(frozen=True, slots=True)
class OfferSeen:
    """One offer of a slot: who claimed it, how it ended, what it was worth."""

    ticket: TicketId
    claims: tuple[ClaimSeen, ...] = ()
    end: Episode | None = None
    end_time: float = 0.0
    score: Score | None = None
    score_time: float = 0.0


def is_dead(score: Score) -> bool:
    """Whether the score closes its slot without a reward."""
    return score.closes_slot and score.outcome is not Outcome.SCORED


async def dead_slots(bus: Bus, run: RunId) -> list[DeadSlot]:
    """Every dead slot on record, oldest first.

    Raises:
        BusError: The bus can not be read.
    """
    retries = await _retries(bus, run)
    found: list[DeadSlot] = []
    async for message in bus.scan(stream_name(run, Stream.SCORES)):
        score = await _readable(bus, run, Stream.SCORES, message)
        if isinstance(score, Score) and is_dead(score):
            found.append(_dead(score, message.time, retries))
    return found


def _dead(score: Score, time: float, retries: dict[str, GroupId]) -> DeadSlot:
    fault = score.fault or Fault(kind=score.outcome.value, message="")
    return DeadSlot(
        ticket=score.ticket.id,
        group=score.ticket.group,
        pool=score.ticket.pool,
        kind=score.ticket.kind.value,
        outcome=score.outcome.value,
        cause=fault.kind,
        message=fault.message,
        time=time,
        retried_as=retries.get(score.ticket.group, ""),
    )


async def _retries(bus: Bus, run: RunId) -> dict[str, GroupId]:
    issues = [issue async for issue in issues_of(bus, run)]
    return {issue.retry_of: group_id(issue.pool, issue.index) for issue in issues if issue.retry_of}


async def issues_of(bus: Bus, run: RunId) -> AsyncIterator[GroupIssue]:
    """Every group that was issued, in order."""
    async for message in bus.scan(stream_name(run, Stream.LEDGER), subject.ledger(run, CURRICULUM)):
        record = await read(bus, run, Stream.LEDGER, message)
        if isinstance(record, GroupIssue):
            yield record


async def has_dead_slot(bus: Bus, run: RunId, issue: GroupIssue) -> bool:
    """Whether a slot of an issued group is dead on record."""
    group = group_id(issue.pool, issue.index)
    subjects = [subject.score(run, TicketId(f"{group}.{member}.*")) for member in range(issue.size)]
    for message in (await bus.last_many(stream_name(run, Stream.SCORES), subjects)).values():
        score = await _readable(bus, run, Stream.SCORES, message)
        if isinstance(score, Score) and is_dead(score):
            return True
    return False


async def history_of(bus: Bus, run: RunId, slot: SlotId) -> list[OfferSeen]:
    """Every offer of a slot that the streams know of, with its claims, its end and its score."""
    offers = TicketId(f"{slot}.*")
    claims: dict[TicketId, list[ClaimSeen]] = {}
    async for message in bus.scan(stream_name(run, Stream.CLAIMS), subject.claim(run, offers)):
        claim = await _readable(bus, run, Stream.CLAIMS, message)
        if isinstance(claim, Claim):
            seen = ClaimSeen(message.sequence, claim.worker, message.time)
            claims.setdefault(claim.ticket.id, []).append(seen)
    ends = await _newest(bus, run, Stream.EPISODES, subject.episode(run, offers))
    scores = await _newest(bus, run, Stream.SCORES, subject.score(run, offers))
    tickets = sorted({*claims, *ends, *scores}, key=lambda one: TicketName.parse(one).offer)
    return [await _offer(bus, run, one, tuple(claims.get(one, ())), ends.get(one), scores.get(one)) for one in tickets]


async def _newest(bus: Bus, run: RunId, stream: Stream, of: str) -> dict[TicketId, StoredMessage]:
    found = await bus.last_many(stream_name(run, stream), [of])
    return {TicketId(".".join(where.split(".")[-3:])): message for where, message in found.items()}


async def _offer(
    bus: Bus,
    run: RunId,
    ticket: TicketId,
    claims: tuple[ClaimSeen, ...],
    ended: StoredMessage | None,
    scored: StoredMessage | None,
) -> OfferSeen:
    end = await _readable(bus, run, Stream.EPISODES, ended) if ended else None
    score = await _readable(bus, run, Stream.SCORES, scored) if scored else None
    return OfferSeen(
        ticket=ticket,
        claims=claims,
        end=end if isinstance(end, Episode) else None,
        end_time=ended.time if ended else 0.0,
        score=score if isinstance(score, Score) else None,
        score_time=scored.time if scored else 0.0,
    )


async def _readable(bus: Bus, run: RunId, stream: Stream, message: StoredMessage) -> Record | None:
    """The record, or None where it can not be read: one strange record hides no others."""
    try:
        return await read(bus, run, stream, message)
    except RecordError:
        return None
