"""The claim service on the in-memory bus: what a claim costs, and what a desk that knows too little finds out."""

from collections.abc import AsyncIterator, Sequence

import pytest
from made_issue import group_issue

from agentjet.bus.clock import BusClock
from agentjet.bus.memory import MemoryBus
from agentjet.bus.protocol import StoredMessage
from agentjet.bus.record import put, stream_specs
from agentjet.curriculum.board import Board, tickets_of
from agentjet.curriculum.service import ClaimDesk
from agentjet.schemas import subject
from agentjet.schemas.claim import AuthorizeRequest, ClaimGrant, ClaimRequest
from agentjet.schemas.episode import EndStatus, Episode
from agentjet.schemas.ids import RunId
from agentjet.schemas.ledger import GroupIssue
from agentjet.schemas.score import Outcome, Score
from agentjet.schemas.subject import Stream
from agentjet.schemas.task import Ticket

RUN = RunId("run-aaaaaa")
SECRET = b"0123456789abcdef"


class CountingBus(MemoryBus):
    """Counts what costs a round trip."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    async def publish(self, subject: str, payload: bytes, **options: object) -> int:  # type: ignore[override]
        self.requests.append("publish")
        return await super().publish(subject, payload, **options)  # type: ignore[arg-type]

    async def get(self, stream: str, sequence: int) -> StoredMessage | None:
        self.requests.append("get")
        return await super().get(stream, sequence)

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        self.requests.append("last")
        return await super().last(stream, subject)


@pytest.fixture
async def bus() -> AsyncIterator[CountingBus]:
    bus = CountingBus()
    for spec in stream_specs(RUN, max_bytes=2**30):
        await bus.ensure_stream(spec)
    yield bus


def issue(client_group: str = "") -> GroupIssue:
    return group_issue(RUN, max_offers=2, client_group=client_group)


def desk_of(bus: MemoryBus, of: GroupIssue) -> tuple[ClaimDesk, Board]:
    """A curriculum that knows of the issue and of nothing else."""
    board = Board(RUN, lambda _: {})
    board.issue(of, 0.0)
    return ClaimDesk(bus, RUN, board, BusClock(), SECRET), board


async def claim(desk: ClaimDesk, ticket: Ticket) -> ClaimGrant:
    return await desk.claim(ClaimRequest(run=RUN, ticket=ticket.id, worker="w"))


def first_ticket(of: GroupIssue) -> Ticket:
    return tickets_of(RUN, of, {})[0]


async def end(bus: MemoryBus, ticket: Ticket, attempt: int) -> None:
    episode = Episode(run=RUN, ticket=ticket, attempt=attempt, status=EndStatus.COMPLETED, reward=1.0)
    await put(bus, RUN, Stream.EPISODES, subject.episode(RUN, ticket.id), episode, expected=0)


def requests_since(bus: CountingBus, start: int) -> Sequence[str]:
    return bus.requests[start:]


async def test_a_first_claim_costs_one_request(bus: CountingBus):
    desk, board = desk_of(bus, issue())
    ticket = first_ticket(issue())
    grant = await claim(desk, ticket)
    assert grant.granted and bus.requests == ["publish"]
    assert board.claims[ticket.id].attempt == grant.attempt and board.claims[ticket.id].deadline == grant.deadline


async def test_a_key_may_call_the_tickets_models_and_the_untrained_ones(bus: CountingBus):
    of = issue()
    ticket, board = first_ticket(of), desk_of(bus, of)[1]
    desk = ClaimDesk(bus, RUN, board, BusClock(), SECRET, served_models=("judge", *ticket.models))
    grant = await claim(desk, ticket)
    may = await desk.authorize(AuthorizeRequest(key=grant.key))
    assert (may.models, may.untrained) == ((*ticket.models, "judge"), ("judge",))


async def test_a_second_claim_looks_for_an_end_first(bus: CountingBus):
    desk, _ = desk_of(bus, issue())
    ticket = first_ticket(issue())
    first, start = await claim(desk, ticket), len(bus.requests)
    second = await claim(desk, ticket)
    assert second.granted and second.attempt > first.attempt
    assert requests_since(bus, start) == ["last", "publish"]
    await end(bus, ticket, second.attempt)
    assert (await claim(desk, ticket)).reason == "ended"


async def test_an_end_of_a_claim_that_another_curriculum_granted_is_found(bus: CountingBus):
    ticket = first_ticket(issue())
    granted = await claim(desk_of(bus, issue())[0], ticket)
    await end(bus, ticket, granted.attempt)
    assert (await claim(desk_of(bus, issue())[0], ticket)).reason == "ended"


async def test_a_claim_goes_on_top_of_one_that_another_curriculum_granted(bus: CountingBus):
    ticket = first_ticket(issue())
    first = await claim(desk_of(bus, issue())[0], ticket)
    desk, board = desk_of(bus, issue())
    second = await claim(desk, ticket)
    assert second.granted and second.attempt > first.attempt
    assert board.claims[ticket.id].number == 2


async def test_an_older_claim_that_is_read_late_hides_no_newer_one(bus: CountingBus, monkeypatch: pytest.MonkeyPatch):
    ticket, newest, overtaken = first_ticket(issue()), bus.last, False
    await claim(desk_of(bus, issue())[0], ticket)
    desk, board = desk_of(bus, issue())

    async def overtaking(stream: str, of: str) -> StoredMessage | None:
        nonlocal overtaken
        message = await newest(stream, of)
        if not overtaken:
            overtaken = True
            await claim(desk, ticket)
        return message

    monkeypatch.setattr(bus, "last", overtaking)
    start = len(bus.requests)
    assert (await claim(desk, ticket)).granted
    assert board.claims[ticket.id].number == 3
    assert requests_since(bus, start).count("publish") == 4, "two conflicts over the first claim and no other"


async def test_a_client_s_ticket_may_have_died_before_its_first_claim(bus: CountingBus):
    of = issue(client_group="own")
    await end(bus, first_ticket(of), 0)
    assert (await claim(desk_of(bus, of)[0], first_ticket(of))).reason == "ended"


def test_the_board_notes_nothing_of_a_slot_that_went_on():
    board = Board(RUN, lambda _: {})
    board.issue(issue(), 0.0)
    ticket = first_ticket(issue())
    board.claim(ticket.id, 1, 60.0, 1)
    board.end(ticket.id)
    board.score(Score(run=RUN, ticket=ticket, attempt=1, outcome=Outcome.SCORED, reward=1.0))
    assert not board.claims and not board.ended
    board.claim(ticket.id, 2, 60.0, 2)
    board.end(ticket.id)
    assert not board.claims and not board.ended
