"""What the curriculum learns from the streams at its start."""

from types import SimpleNamespace
from typing import Any

from made_issue import group_issue

from agentjet.bus.clock import BusClock
from agentjet.bus.memory import MemoryBus
from agentjet.bus.record import put, stream_specs
from agentjet.curriculum.board import Board, ticket_of
from agentjet.curriculum.feed import Feed
from agentjet.schemas import subject
from agentjet.schemas.claim import Claim
from agentjet.schemas.ids import RunId, TicketId
from agentjet.schemas.subject import Stream

RUN, FIRST, SECOND = RunId("run-abc"), TicketId("p-0.0.0"), TicketId("p-0.1.0")


async def test_p03_a_claim_that_is_granted_while_older_ones_are_recalled_stays(memory_bus: MemoryBus, monkeypatch):
    for spec in stream_specs(RUN, max_bytes=2**30):
        await memory_bus.ensure_stream(spec)
    issue = group_issue(RUN)
    board = Board(RUN, task_of=lambda _: {})
    board.issue(issue, 0.0)
    course: Any = SimpleNamespace(board=board)

    async def claim(ticket: TicketId, number: int) -> int:
        record = Claim(ticket=ticket_of(RUN, issue, {}, int(ticket[4]), 0), worker="w", number=number)
        return await put(memory_bus, RUN, Stream.CLAIMS, subject.claim(RUN, ticket), record)

    old = [await claim(ticket, 1) for ticket in (FIRST, SECOND)]
    read_many = memory_bus.last_many

    async def meanwhile(stream, subjects):
        found = await read_many(stream, subjects)
        board.claim(FIRST, await claim(FIRST, 2), 99.0, 2)
        return found

    monkeypatch.setattr(memory_bus, "last_many", meanwhile)
    await Feed(memory_bus, RUN, course, BusClock(), lambda: None).recall_claims()
    assert (board.claims[FIRST].number, board.claims[FIRST].deadline) == (2, 99.0)
    assert (board.claims[SECOND].number, board.claims[SECOND].attempt) == (1, old[1])
